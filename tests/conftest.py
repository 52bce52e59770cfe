pytest_plugins = ["tests.store_fixtures", "tests.kafka_fixtures"]
