"""Stores for tests: one embedded engine for the whole session, a fresh database for each test, and the same on a server where one is given.

`KVTIDE_TEST_CLICKHOUSE=http://user:pw@host:port` adds a run of every store test against that server.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.address import parse_url
from ingest.store import Store

SERVER = os.environ.get("KVTIDE_TEST_CLICKHOUSE", "")
BACKENDS = ["embedded", "served"] if SERVER else ["embedded"]
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The one folder that this process opens; an open connection keeps its engine alive between tests."""
    folder = tmp_path_factory.mktemp("store")
    keeper = Store.open(f"chdb://{folder}")
    yield folder
    keeper.close()


@pytest.fixture(params=BACKENDS)
def store_url(request: pytest.FixtureRequest, store_folder: Path) -> Iterator[str]:
    """URL of a database of the test's own, not migrated; dropped afterwards."""
    name = f"test_{os.getpid()}_{next(_numbers)}"
    url = f"chdb://{store_folder}?database={name}" if request.param == "embedded" else f"{SERVER.rstrip('/')}/{name}"
    yield url
    with Store.open(url, create=True) as store:
        store.command(f"DROP DATABASE {parse_url(url).database}")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open, migrated store with a database of the test's own; `store.url` opens it again."""
    with Store.open(store_url, create=True) as opened:
        opened.migrate()
        yield opened
