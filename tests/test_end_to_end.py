"""A whole replay on real Kafka and Faust: the same rows in every table, to the last digit, as the embedded run of the same seed."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from analytics.fleet.chunks import Chunk
from ingest.batching import Batcher
from ingest.events import DLQ_TOPIC, partition_of
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


@dataclass(frozen=True)
class Replay:
    """Events of a run and the rows that its embedded run leaves."""

    chunks: list[Chunk]
    wanted: Tables


@pytest.fixture(scope="module")
def embedded(store_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Replay]:
    """Function from a replay (and how many requests of a trace) to its events and the rows of local log and plain loop."""

    @functools.cache
    def run(make: Callable[..., list[Chunk]], limit: int | None = None) -> Replay:
        chunks = make(limit)
        with database(store_folder, f"embedded_{make.__name__}_{limit}") as (store, _):
            run_embedded(chunks, store, tmp_path_factory.mktemp("log"), partitions=PARTITIONS)
            return Replay(chunks, dump(store))

    return run


@contextlib.contextmanager
def database(folder: Path, name: str) -> Iterator[tuple[Store, str]]:
    """A database of the test's own in the engine that this process has open, and its URL."""
    url = f"chdb://{folder}?database={name}"
    with Store.open(url) as store:
        store.migrate()
        yield store, url
        store.command(f"DROP DATABASE {name}")


def config(kafka: str, topic: str, url: str, *, until_end: bool) -> AppConfig:
    return AppConfig(
        bootstrap=kafka,
        topic=topic,
        group=f"g.{topic}",
        partitions=PARTITIONS,
        open_store=lambda: Store.open(url),
        until_end=until_end,
        session_timeout_s=0.9,
    )


@pytest.fixture
def batcher(kafka: str, topic: str) -> Batcher:
    ensure_topics(kafka, {topic: PARTITIONS, DLQ_TOPIC: 1})
    return Batcher(KafkaSink(kafka, topic), PARTITIONS)


def assert_same(got: Tables, replay: Replay) -> None:
    """Every row of every table, counts first since they say more when they differ."""
    wanted = replay.wanted
    assert len(wanted["access_raw"]) == requests_of(replay.chunks) and wanted["dead_letter_raw"] == []
    assert all(len(wanted[name]) > 50 for name in RAW_AND_WINDOWS), {name: len(rows) for name, rows in wanted.items()}
    assert {name: len(rows) for name, rows in got.items()} == {name: len(rows) for name, rows in wanted.items()}
    assert got == wanted


@pytest.mark.parametrize("make", REPLAYS)
def test_one_worker_gives_the_rows_of_the_embedded_run(
    make: Callable[..., list[Chunk]], embedded: Callable[..., Replay], kafka: str, topic: str, batcher: Batcher, store_folder: Path
) -> None:
    replay = embedded(make)
    publish(replay.chunks, batcher)
    with database(store_folder, "one") as (store, url):
        stats = run_workers(config(kafka, topic, url, until_end=True))
        assert sum(item.records for item in stats) == batcher.records and sum(item.bad_rows for item in stats) == 0
        assert_same(dump(store), replay)


@pytest.mark.parametrize(("make", "limit"), [pytest.param(conversation, 3000, marks=pytest.mark.traces), (generated, None)])
def test_two_workers_sharing_the_partitions_give_the_same_rows(
    make: Callable[..., list[Chunk]],
    limit: int | None,
    embedded: Callable[..., Replay],
    kafka: str,
    topic: str,
    batcher: Batcher,
    store_folder: Path,
) -> None:
    """The second worker joins when the first has half of the events; each then has tenants of its own."""
    replay = embedded(make, limit)
    chunks = replay.chunks
    owned = {partition_of(tenant, PARTITIONS) for tenant in chunks[0].vocabulary.tenants}
    with database(store_folder, "two") as (store, url):
        shared = config(kafka, topic, url, until_end=False)
        with Group(shared) as first, Group(shared) as second:
            groups = (first, second)
            publish(chunks[: len(chunks) // 2], batcher)
            _until(groups, lambda: all(len(group.members[0].assigned) == PARTITIONS // 2 for group in groups), "a fair share")
            shares = [group.members[0].assigned & owned for group in groups]
            publish(chunks[len(chunks) // 2 :], batcher)
            _until(groups, lambda: _committed_all(kafka, topic), "all committed")
            worked = [sum(stats.rows for stats in group.stats()) for group in groups]
        for group in groups:
            group.raise_failure()
        assert all(shares) and min(worked) > 0, (shares, worked)
        assert_same(dump(store), replay)


def _committed_all(kafka: str, topic: str) -> bool:
    committed = committed_offsets(kafka, f"g.{topic}", topic)
    return all(committed.get(partition, 0) >= end for partition, end in end_offsets(kafka, topic).items())


def _until(groups: tuple[Group, ...], met: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    """Wait for the broker and the workers, which run by themselves; a failure of theirs ends the wait."""
    deadline = time.monotonic() + seconds
    while not met() and not any(group.failed for group in groups):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)
