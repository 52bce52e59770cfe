"""Real Apache Kafka and Faust: the same rows as the plain loop, through bad input, SIGKILL, rebalances and two members."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from faust.types import TP

from ingest.batching import Batcher
from ingest.errors import KvtideError, UsageError
from ingest.events import DLQ_TOPIC, to_batch
from ingest.events import encode as encode_record
from ingest.kafka import KafkaReader, KafkaSink, check, committed_offsets, end_offsets, ensure_topics
from ingest.locallog import LocalLog
from ingest.store import Store
from kvtide.emulation import publish
from kvtide.pipeline import run_embedded
from streams.app import AppConfig, Group, Member, run_workers
from streams.local import run_local
from streams.shard import ShardConfig
from streams.worker import BadRowRatio, OffsetGap
from tests.contract import Event, access, events
from tests.dump_store import dump
from tests.replays import generated, requests_of

pytestmark = pytest.mark.kafka
ROOT = Path(__file__).parent.parent
SESSION_S = 0.9


def _publish(kafka: str, topic: str, made: Sequence[Event], partitions: int) -> None:
    ensure_topics(kafka, {topic: partitions, DLQ_TOPIC: 1})
    sink = KafkaSink(kafka, topic)
    batcher = Batcher(sink, partitions, max_rows=40)
    for event in made:
        batcher.add(event)
    batcher.flush()
    sink.close()


def _undisturbed(
    folder: Path, store: Store, topic: str, made: Sequence[Event], partitions: int, max_rows: int = 40
) -> dict[str, list[str]]:
    """Rows of the plain loop over a local log of the same events."""
    with LocalLog(folder, topic, partitions) as log:
        batcher = Batcher(log, partitions, max_rows=40, linger_s=4.0)
        for event in made:
            batcher.add(event)
        batcher.flush()
        run_local(log, store, ShardConfig())
    return dump(store)


def _config(kafka: str, topic: str, url: str, partitions: int = 8, **options: object) -> AppConfig:
    values = {"group": f"g.{topic}", "until_end": True, "session_timeout_s": SESSION_S, "checkpoint_s": 0.5, **options}
    return AppConfig(bootstrap=kafka, topic=topic, open_store=lambda: Store.open(url), partitions=partitions, **values)  # type: ignore[arg-type]


def _until(met: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.05)


@contextlib.contextmanager
def _second_store(store: Store, name: str) -> Iterator[tuple[Store, str]]:
    """Another database of the test's engine."""
    database = f"{store.address.database}_{name}"
    assert store.address.path is not None
    url = f"chdb://{store.address.path}?database={database}"
    with Store.open(url) as other:
        other.migrate()
        yield other, url
        other.command(f"DROP DATABASE {database}")


@pytest.fixture
def embedded(store: Store) -> Store:
    if store.address.path is None:
        pytest.skip("compares two databases of the embedded engine")
    return store


def _committed_all(kafka: str, topic: str, group: str) -> bool:
    committed = committed_offsets(kafka, group, topic)
    return all(committed.get(partition, 0) >= end for partition, end in end_offsets(kafka, topic).items())


def test_two_members_and_one_give_the_rows_of_the_plain_loop(kafka: str, topic: str, embedded: Store, tmp_path: Path) -> None:
    """The second member joins while the first works, each ends with 4 of 8 partitions, and no row differs."""
    made = events(4000, tenants=24)
    wanted = _undisturbed(tmp_path, embedded, topic, made, 8)
    assert len(wanted["access_raw"]) == 4000 and len(wanted["cause_1m"]) > 100
    ensure_topics(kafka, {topic: 8, DLQ_TOPIC: 1})
    sink = KafkaSink(kafka, topic)
    batcher = Batcher(sink, 8, max_rows=40, linger_s=4.0)
    with _second_store(embedded, "one") as (one, one_url), _second_store(embedded, "two") as (two, two_url):
        # Nobody dies here: the default session timeout, so that a starved machine turns no member out of the group.
        config = _config(kafka, topic, two_url, until_end=False, session_timeout_s=AppConfig.session_timeout_s)
        with Group(config) as first, Group(config) as second:
            for event in made[: len(made) // 2]:
                batcher.add(event)
            sink.flush()
            groups = (first, second)
            _until(lambda: any(g.failed for g in groups) or all(len(g.members[0].assigned) == 4 for g in groups), "a fair share")
            for event in made[len(made) // 2 :]:
                batcher.add(event)
            batcher.flush()
            _until(lambda: any(g.failed for g in groups) or _committed_all(kafka, topic, config.group), "all committed")
            worked = [sum(stats.records for stats in group.stats()) for group in groups]
        for group in groups:
            group.raise_failure()
        assert min(worked) > 0 and sum(worked) >= batcher.records
        assert dump(two) == wanted
        run_workers(_config(kafka, topic, one_url, group=f"one.{topic}"))
        assert dump(one) == wanted


def test_bad_records_end_in_the_dead_letter_topic_with_their_bytes(kafka: str, topic: str, store: Store, store_url: str) -> None:
    ensure_topics(kafka, {topic: 1, DLQ_TOPIC: 1})
    sink = KafkaSink(kafka, topic, compression="zstd")
    good = {"kind": b"access", "schema": b"1"}
    batch = to_batch("access", [access(0), access(1, hit_tokens=10**6), access(2)])
    sink.append_raw(0, good, b"\x00 no arrow")
    sink.append_raw(0, good, b"")
    sink.append_raw(0, {}, b"no headers")
    sink.append_raw(0, {**good, "schema": b"99"}, b"of the future")
    sink.append(0, encode_record("access", batch))
    late = [access(3, ts_us=access(3).ts_us + 600_000_000)]
    sink.append(0, encode_record("access", to_batch("access", late)))
    sink.flush()
    before = sum(end_offsets(kafka, DLQ_TOPIC).values())
    run_workers(_config(kafka, topic, store_url, partitions=1))

    with KafkaReader(kafka, DLQ_TOPIC, {0: before}) as reader:
        letters = [letter for some in iter(lambda: reader.read(2.0, most=1), []) for letter in some]
    found = [(int(letter.headers["kvtide.offset"]), letter.headers["kvtide.reason"], letter.value) for letter in letters]
    assert found == [
        (0, b"not_arrow", b"\x00 no arrow"),
        (1, b"not_arrow", b""),
        (2, b"unknown_kind", b"no headers"),
        (3, b"unknown_schema", b"of the future"),
        (4, b"hit_exceeds_prompt", encode_record("access", batch.slice(1, 1)).value),
    ]
    assert {letter.headers["kvtide.topic"] for letter in letters} == {topic.encode()}
    rows = store.rows("SELECT offset, reason FROM dead_letter_raw ORDER BY offset")
    assert [(row["offset"], row["reason"].encode()) for row in rows] == [(offset, reason) for offset, reason, _ in found]
    assert [row["request_id"] for row in store.rows("SELECT request_id FROM access_raw ORDER BY ts")] == ["r0", "r2"]


def test_an_orderly_stop_with_work_waiting_commits_exactly_what_its_checkpoints_hold(
    kafka: str, topic: str, store_url: str, store: Store
) -> None:
    """Faust drains its buffers as it stops; nothing that it drains may count as done."""
    _publish(kafka, topic, events(6000, tenants=12), 4)
    ends, stopped_early = end_offsets(kafka, topic), 0
    held: dict[int, int] = {}
    for _ in range(3):
        if held == ends:  # a worker that finds nothing more to do would wait for ever
            break
        stop = threading.Event()
        run_workers(
            _config(kafka, topic, store_url, partitions=4, until_end=False),
            progress=lambda stats, stop=stop: sum(item.records for item in stats) and stop.set(),  # type: ignore[misc]
            stop=stop,
        )
        held = {partition: found[0] for partition in ends if (found := store.load_checkpoint(topic, partition))}
        assert committed_offsets(kafka, f"g.{topic}", topic) == held
        stopped_early += sum(held.values()) < sum(ends.values())
    run_workers(_config(kafka, topic, store_url, partitions=4))
    assert committed_offsets(kafka, f"g.{topic}", topic) == ends
    assert stopped_early, "at least one stop found work waiting"


def test_a_failing_worker_stops_and_acknowledges_nothing_beyond_its_checkpoint(
    kafka: str, topic: str, store_url: str, store: Store
) -> None:
    ensure_topics(kafka, {topic: 1, DLQ_TOPIC: 1})
    sink = KafkaSink(kafka, topic)
    for _ in range(700):
        sink.append_raw(0, {}, b"junk")
    sink.flush()
    with pytest.raises(BadRowRatio):
        run_workers(_config(kafka, topic, store_url, partitions=1, checkpoint_s=60.0))
    assert committed_offsets(kafka, f"g.{topic}", topic) == {}
    assert store.load_checkpoint(topic, 0) is None


def test_a_message_without_value_is_a_dead_letter_not_a_gap(kafka: str, topic: str, store: Store, store_url: str) -> None:
    """Faust skips tombstones unless told otherwise; a skipped offset would look like a lost record."""
    ensure_topics(kafka, {topic: 1, DLQ_TOPIC: 1})
    sink = KafkaSink(kafka, topic)
    sink._producer.produce(topic, None, key=b"k", partition=0)
    sink.append(0, encode_record("access", to_batch("access", [access(0)])))
    sink.flush()
    stats = run_workers(_config(kafka, topic, store_url, partitions=1))
    assert sum(item.records for item in stats) == 2
    assert [row["reason"] for row in store.rows("SELECT reason FROM dead_letter_raw")] == ["unknown_kind"]


def test_the_command_ends_with_one_line_and_code_1_when_its_worker_fails(kafka: str, topic: str, tmp_path: Path) -> None:
    ensure_topics(kafka, {topic: 1, DLQ_TOPIC: 1})
    sink = KafkaSink(kafka, topic)
    for _ in range(600):
        sink.append_raw(0, {}, b"junk")
    sink.flush()
    command = [sys.executable, "-m", "kvtide", "work", "--kafka", kafka, "--store", f"chdb://{tmp_path}/s", "--topic", topic]
    options = ["--group", f"g.{topic}", "--partitions", "1", "--session-timeout-s", str(SESSION_S)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert "rows break the contract" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_committed_offset_ahead_of_the_checkpoint_stops_with_what_is_missing(
    kafka: str, topic: str, embedded: Store, store_url: str
) -> None:
    """The group has gone on but the store is another one: its windows would miss all that was acknowledged."""
    _publish(kafka, topic, events(300), 1)
    run_workers(_config(kafka, topic, store_url, partitions=1))
    end = end_offsets(kafka, topic)[0]
    with _second_store(embedded, "fresh") as (_, url):
        _publish(kafka, topic, events(10), 1)
        with pytest.raises(OffsetGap, match=rf"records 0 to {end - 1} are missing"):
            run_workers(_config(kafka, topic, url, partitions=1))


def test_topics_keep_their_partition_count_and_a_missing_broker_is_named(kafka: str, topic: str) -> None:
    ensure_topics(kafka, {topic: 3})
    ensure_topics(kafka, {topic: 3})
    with pytest.raises(UsageError, match="has 3 partitions, not 4; set KVTIDE_PARTITIONS=3"):
        ensure_topics(kafka, {topic: 4})
    assert "broker" in check(kafka)
    with pytest.raises(KvtideError, match=r"no Kafka at 127.0.0.1:1: .*KVTIDE_KAFKA"):
        check("127.0.0.1:1", timeout_s=1.0)


def test_an_undelivered_record_is_an_error_at_flush(kafka: str, topic: str) -> None:
    sink = KafkaSink(kafka, f"{topic}.absent", delivery_timeout_s=2.0)
    sink.append_raw(0, {}, b"x")
    with pytest.raises(KvtideError, match="was not delivered"):
        sink.flush()


def test_a_full_queue_makes_the_producer_wait_and_loses_nothing(kafka: str, topic: str) -> None:
    ensure_topics(kafka, {topic: 1})
    sink = KafkaSink(kafka, topic, queue_bytes=64 * 1024)
    payloads = [bytes([i % 256]) * 20_000 for i in range(200)]
    for payload in payloads:
        sink.append_raw(0, {}, payload)
    sink.flush()
    with KafkaReader(kafka, topic) as reader:
        read = [record.value for batch in iter(lambda: reader.read(2.0), []) for record in batch]
    assert read == payloads and sink.delivered == 200


class Kill(NamedTuple):
    """What stood at the moment of a kill: offsets that the group had committed, the ends of the log, and the worker's last line."""

    committed: dict[int, int]
    ends: dict[int, int]
    line: str

    @property
    def behind(self) -> int:
        return sum(end - self.committed.get(partition, 0) for partition, end in self.ends.items())

    def __str__(self) -> str:
        at = " ".join(f"{partition}:{self.committed.get(partition, 0)}/{end}" for partition, end in sorted(self.ends.items()))
        return f"committed {at}, {self.behind} records behind; {self.line}"


class Killed:
    """`kvtide work` in processes of its own that are killed and started again."""

    def __init__(self, kafka: str, topic: str, url: str) -> None:
        self._kafka, self._topic, self._group = kafka, topic, f"g.{topic}"
        self._command = [sys.executable, "-m", "kvtide", "work", "--kafka", kafka, "--store", url, "--topic", topic]
        self._command += ["--group", self._group]
        self._command += ["--partitions", "4", "--checkpoint-s", "0.15", "--session-timeout-s", str(SESSION_S)]

    def run_and_kill(self, rng: random.Random, portion: Callable[[], None]) -> Kill:
        """Start with records waiting, publish more when it works, kill a random moment later.

        Every third one is killed a random moment after its start instead, at work or not.
        """
        process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        last, at_work = "", rng.random() < 0.67
        for line in process.stderr:
            last = line.strip()
            if " records " in line and (" 0 records " not in line or not at_work):
                break
        portion()
        time.sleep(rng.uniform(0.0, 0.7 if at_work else 2.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"the worker ended by itself: {last}"
        last = [last, *process.stderr.read().splitlines()][-1]
        process.stderr.close()
        return Kill(committed_offsets(self._kafka, self._group, self._topic), end_offsets(self._kafka, self._topic), last)

    def finish(self) -> dict[str, int]:
        """Run to the end of the topic in peace."""
        done = subprocess.run([*self._command, "--until-end", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def sigterm(self) -> int:
        """Start, let it work, end it in order; returns its exit code."""
        process = subprocess.Popen(self._command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            if " records " in line:
                break
        process.terminate()
        process.communicate(timeout=40)
        return process.returncode


@pytest.mark.slow
def test_ten_sigkills_at_random_points_leave_the_rows_of_an_undisturbed_run(
    kafka: str, topic: str, embedded: Store, tmp_path: Path
) -> None:
    """An emulated fleet's events, published in portions while workers die; then every row of every table, none missing, none doubled."""
    chunks = generated()
    run_embedded(chunks, embedded, tmp_path / "log", partitions=4)
    wanted = dump(embedded)
    assert len({json.loads(row)["window_start"] for row in wanted["traffic_1m"]}) >= 12
    assert len(wanted["access_raw"]) == requests_of(chunks)
    ensure_topics(kafka, {topic: 4, DLQ_TOPIC: 1})
    batcher = Batcher(KafkaSink(kafka, topic), 4)
    portions = [chunks[i : i + len(chunks) // 12] for i in range(0, len(chunks), len(chunks) // 12)]
    publish(portions.pop(0), batcher)
    url = f"chdb://{tmp_path / 'killed'}"
    worker, rng = Killed(kafka, topic, url), random.Random(7)
    kills = [worker.run_and_kill(rng, lambda: publish(portions.pop(0), batcher)) for _ in range(10)]  # type: ignore[arg-type]
    assert worker.sigterm() == 0
    for portion in portions:
        publish(portion, batcher)
    stats = worker.finish()
    print(f"{len(kills)} kills:", *kills, f"then {stats}", sep="\n  ")
    assert sum(kill.behind > 0 for kill in kills) >= 5, "kills must strike workers that are not done"
    assert stats["lag"] == 0
    read = subprocess.run([sys.executable, "-m", "tests.dump_store", url], cwd=ROOT, capture_output=True, text=True, check=True)
    got = json.loads(read.stdout)
    assert {name: len(rows) for name, rows in got.items()} == {name: len(rows) for name, rows in wanted.items()}
    assert got == wanted


@pytest.mark.parametrize(("assigned", "wanted"), [(set(), {}), ({1}, {1: 7}), ({0, 1, 2}, {0: 5, 1: 7})])
def test_only_offsets_of_assigned_partitions_are_committed(kafka: str, topic: str, assigned: set[int], wanted: dict[int, int]) -> None:
    """A partition that left between checkpoint and commit is passed over; with none left Faust is not asked (it would crash)."""
    committed: list[dict[TP, int]] = []

    class Thread:
        async def call_thread(self, work: Callable[[], Awaitable[dict[int, int]]]) -> dict[int, int]:
            return await work()

        def assignment(self) -> set[TP]:
            return {TP(topic, partition) for partition in assigned} | {TP("another", 0)}

        async def _commit(self, offsets: dict[TP, int]) -> bool:
            committed.append(offsets)
            return True

    member = Member(_config(kafka, topic, "embedded"), "log", {})
    member._app = SimpleNamespace(consumer=SimpleNamespace(_thread=Thread()))  # type: ignore[assignment]
    assert asyncio.run(member._commit({0: 5, 1: 7})) == wanted
    assert committed == ([{TP(topic, p): o for p, o in wanted.items()}] if wanted else [])
