pytest_plugins = ["tests.store_fixtures"]
