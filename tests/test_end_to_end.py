"""A whole replay on real Kafka and Faust: the same rows in every table, to the last digit, as the embedded run of the same seed."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from analytics.fleet.chunks import Chunk
from ingest.batching import Batcher
from ingest.events import DLQ_TOPIC
from ingest.kafka import KafkaSink, committed_offsets, end_offsets, ensure_topics
from ingest.store import Store
from kvtide.emulation import publish
from kvtide.pipeline import run_embedded
from streams.app import AppConfig, Group, run_workers
from tests.dump_store import dump
from tests.replays import conversation, generated, requests_of

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
PARTITIONS = 8
RAW_AND_WINDOWS = ("access_raw", "cause_1m", "instance_raw", "residency_1m", "reuse_1m", "reuse_time_1m", "traffic_1m")
Tables = dict[str, list[str]]


REPLAYS = [pytest.param(conversation, marks=pytest.mark.traces), generated]


class Carriers:
    """Runs one topic's events embedded and through Kafka, each into a database of its own in the test's engine."""

    def __init__(self, store: Store, kafka: str, topic: str, folder: Path) -> None:
        assert store.address.path is not None
        self._engine, self._database = store.address.path, store.address.database
        self.kafka, self.topic, self._folder = kafka, topic, folder
        ensure_topics(kafka, {topic: PARTITIONS, DLQ_TOPIC: 1})
        self.batcher = Batcher(KafkaSink(kafka, topic), PARTITIONS)

    def url(self, name: str) -> str:
        return f"chdb://{self._engine}?database={self._database}_{name}"

    @contextlib.contextmanager
    def database(self, name: str) -> Iterator[Store]:
        with Store.open(self.url(name)) as store:
            store.migrate()
            yield store
            store.command(f"DROP DATABASE {self._database}_{name}")

    def embedded(self, chunks: list[Chunk]) -> Tables:
        """Local log and plain loop."""
        with self.database("embedded") as store:
            run_embedded(chunks, store, self._folder / "log", partitions=PARTITIONS)
            return dump(store)

    def config(self, database: str, *, until_end: bool) -> AppConfig:
        return AppConfig(
            bootstrap=self.kafka,
            topic=self.topic,
            group=f"g.{self.topic}",
            partitions=PARTITIONS,
            open_store=lambda: Store.open(self.url(database)),
            until_end=until_end,
            session_timeout_s=0.9,
        )

    def committed_all(self, group: str) -> bool:
        committed = committed_offsets(self.kafka, group, self.topic)
        return all(committed.get(partition, 0) >= end for partition, end in end_offsets(self.kafka, self.topic).items())


@pytest.fixture
def carriers(store: Store, kafka: str, topic: str, tmp_path: Path) -> Carriers:
    if store.address.path is None:
        pytest.skip("compares databases of the embedded engine")
    return Carriers(store, kafka, topic, tmp_path)


def assert_same(got: Tables, wanted: Tables, accesses: int) -> None:
    """Every row of every table, counts first since they say more when they differ."""
    assert len(wanted["access_raw"]) == accesses and wanted["dead_letter_raw"] == []
    assert all(len(wanted[name]) > 50 for name in RAW_AND_WINDOWS), {name: len(rows) for name, rows in wanted.items()}
    assert {name: len(rows) for name, rows in got.items()} == {name: len(rows) for name, rows in wanted.items()}
    assert got == wanted


@pytest.mark.parametrize("replay", REPLAYS)
def test_one_worker_gives_the_rows_of_the_embedded_run(replay: Callable[..., list[Chunk]], carriers: Carriers) -> None:
    chunks = replay()
    wanted = carriers.embedded(chunks)
    publish(chunks, carriers.batcher)
    with carriers.database("kafka") as store:
        stats = run_workers(carriers.config("kafka", until_end=True))
        assert sum(item.records for item in stats) == carriers.batcher.records and sum(item.bad_rows for item in stats) == 0
        assert_same(dump(store), wanted, requests_of(chunks))


@pytest.mark.parametrize("replay", REPLAYS)
def test_two_workers_sharing_the_partitions_give_the_same_rows(replay: Callable[..., list[Chunk]], carriers: Carriers) -> None:
    """The second worker joins when the first has half of the events; each then has tenants of its own."""
    chunks = replay(3000)
    wanted = carriers.embedded(chunks)
    owned = {zlib.crc32(tenant.encode()) % PARTITIONS for tenant in chunks[0].vocabulary.tenants}
    with carriers.database("two") as store:
        config = carriers.config("two", until_end=False)
        with Group(config) as first, Group(config) as second:
            groups = (first, second)
            publish(chunks[: len(chunks) // 2], carriers.batcher)
            _until(groups, lambda: all(len(group.members[0].assigned) == PARTITIONS // 2 for group in groups), "a fair share")
            shares = [group.members[0].assigned & owned for group in groups]
            publish(chunks[len(chunks) // 2 :], carriers.batcher)
            _until(groups, lambda: carriers.committed_all(config.group), "all committed")
            worked = [sum(stats.rows for stats in group.stats()) for group in groups]
        for group in groups:
            group.raise_failure()
        assert all(shares) and min(worked) > 0, (shares, worked)
        assert_same(dump(store), wanted, requests_of(chunks))


def _until(groups: tuple[Group, ...], met: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Wait for the broker and the workers, which run by themselves; a failure of theirs ends the wait."""
    deadline = time.monotonic() + seconds
    while not met() and not any(group.failed for group in groups):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)
