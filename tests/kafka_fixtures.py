"""A real Kafka for the whole test session: KVTIDE_TEST_KAFKA if set, else started here. Its absence skips a local run and fails CI."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from ingest.errors import KvtideError
from kvtide.devkafka import start_kafka

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def kafka() -> Iterator[str]:
    """Bootstrap address of a real Apache Kafka."""
    given = os.environ.get("KVTIDE_TEST_KAFKA")
    if given:
        yield given
        return
    try:
        broker = start_kafka()
    except KvtideError as error:
        if os.environ.get("CI"):
            pytest.fail(f"CI must run the Kafka tests, but: {error}")
        pytest.skip(f"no Kafka here: {error}")
    with broker:
        yield broker.bootstrap


@pytest.fixture
def topic() -> str:
    """A topic name of the test's own."""
    return f"kv.events.{os.getpid()}.{next(_numbers)}"
