"""The partition worker: effectively once through crashes, bad input set aside, gaps refused. Store and clock are stand-ins."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from click.testing import CliRunner

from ingest.batching import Batcher
from ingest.errors import UsageError
from ingest.events import Kind, Record, decode, encode, to_batch
from ingest.locallog import LocalLog
from ingest.store import Store
from kvtide.cli import cli
from streams.local import run_local
from streams.shard import Shard, ShardConfig
from streams.windows import Rows
from streams.worker import BadRowRatio, OffsetGap, PartitionWorker
from tests.contract import ListSink, access, events

Letter = tuple[int, dict[str, bytes], bytes]


class CountingShard:
    """Closes a window every ten rows; its rows say which rows were in it, so that a lost or doubled row shows."""

    def __init__(self, partition: int, config: ShardConfig) -> None:
        self.seen: list[int] = []
        self.closed = 0

    def apply(self, kind: Kind, batch: pa.RecordBatch, offset: int) -> list[Rows]:
        self.seen += batch.column("seq").to_pylist()
        rows = []
        while len(self.seen) >= 10:
            window, self.seen = self.seen[:10], self.seen[10:]
            rows += [Rows(table, str(self.closed), pa.table({"window": [self.closed] * 10, "seq": window})) for table in ("a", "b")]
            self.closed += 1
        return rows

    def snapshot(self) -> bytes:
        return msgspec.json.encode((self.closed, self.seen))

    @classmethod
    def restore(cls, partition: int, config: ShardConfig, data: bytes) -> CountingShard:
        shard = cls(partition, config)
        shard.closed, shard.seen = msgspec.json.decode(data, type=tuple[int, list[int]])
        return shard


class Crash(Exception):
    """The process died here."""


class MemoryStore:
    """Drops a repeated token, as ClickHouse does; dies before or after a write when `doom` says so."""

    def __init__(self) -> None:
        self.tables: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
        self.tokens: set[str] = set()
        self.saved: dict[tuple[str, int], tuple[int, bytes]] = {}
        self.log: list[str] = []
        self.doom: Callable[[], bool] = lambda: False

    def insert(self, table: str, data: pa.Table, token: str | None = None) -> None:
        assert token is not None
        self._maybe_die()
        self.log.append(token)
        if token not in self.tokens:
            self.tokens.add(token)
            self.tables.setdefault(table, []).append((token, data.to_pylist()))
        self._maybe_die()

    def save_checkpoint(self, topic: str, partition: int, next_offset: int, state: bytes) -> None:
        self._maybe_die()
        self.log.append(f"checkpoint {next_offset}")
        self.saved[topic, partition] = (next_offset, state)
        self._maybe_die()

    def load_checkpoint(self, topic: str, partition: int) -> tuple[int, bytes] | None:
        return self.saved.get((topic, partition))

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for _, rows in self.tables.get(table, []) for row in rows]

    def _maybe_die(self) -> None:
        if self.doom():
            raise Crash


def _worker(store: MemoryStore, dlq: ListSink | None = None, now: list[float] | None = None, **options: Any) -> PartitionWorker:
    now = now or [0.0]
    return PartitionWorker(0, "t", store, ShardConfig(), dlq or ListSink(), lambda: now[0], shard_factory=CountingShard, **options)


def _records(count: int, rows: int = 3) -> list[Record]:
    return [encode("access", to_batch("access", [access(i * rows + j) for j in range(rows)])) for i in range(count)]


def _feed(worker: PartitionWorker, records: list[Record], start: int = 0) -> None:
    for offset, record in enumerate(records[start:], start):
        worker.handle(offset, record.headers, record.value)


def test_checkpoint_writes_windows_then_state_then_says_what_may_be_acknowledged() -> None:
    store = MemoryStore()
    worker = _worker(store)
    assert worker.start(0) == 0
    _feed(worker, _records(7))
    assert store.log == [], "nothing is written before the checkpoint"
    assert worker.checkpoint() == 7
    assert store.log == ["a:t:0:0", "b:t:0:0", "a:t:0:1", "b:t:0:1", "checkpoint 7"]
    assert worker.checkpoint() == 7
    assert len(store.log) == 5, "an idle checkpoint writes nothing"


def test_checkpoint_is_due_by_time_and_only_when_something_was_applied() -> None:
    now = [100.0]
    worker = _worker(MemoryStore(), now=now, checkpoint_s=5.0)
    worker.start(0)
    assert not worker.due(1000.0)
    _feed(worker, _records(1))
    assert not worker.due(104.9)
    assert worker.due(105.0)
    now[0] = 106.0
    worker.checkpoint()
    assert not worker.due(1000.0)


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_the_same_after_crashes_at_any_write(seed: int) -> None:
    """INSERT, CRASH, INSERT again; CRASH before or after the checkpoint; records delivered again from below it: always the same rows."""
    records = _records(40)
    calm = MemoryStore()
    worker = _worker(calm)
    worker.start(0)
    _feed(worker, records)
    worker.checkpoint()

    rng = random.Random(seed)
    store, crashes = MemoryStore(), 0
    store.doom = lambda: rng.random() < 0.08
    while True:
        worker = _worker(store)
        try:
            at = max(0, worker.start(0) - rng.randrange(4))  # the broker's commit lags behind: some are delivered again
            while at < len(records):
                worker.handle(at, records[at].headers, records[at].value)
                at += 1
                if rng.random() < 0.3:
                    worker.checkpoint()
            worker.checkpoint()
            break
        except Crash:
            crashes += 1
    assert {name: store.rows(name) for name in ("a", "b")} == {name: calm.rows(name) for name in ("a", "b")}
    assert store.saved == calm.saved
    assert crashes or seed


def test_crash_between_insert_and_checkpoint_then_retry() -> None:
    store = MemoryStore()
    writes = iter([False] * 8 + [True])  # four inserts, each asks twice; dies as the checkpoint begins
    store.doom = lambda: next(writes, False)
    worker = _worker(store)
    worker.start(0)
    records = _records(7)
    _feed(worker, records)
    with pytest.raises(Crash):
        worker.checkpoint()
    assert store.saved == {} and len(store.rows("a")) == 20
    again = _worker(store)
    assert again.start(0) == 0
    _feed(again, records)
    assert again.checkpoint() == 7
    assert store.log.count("a:t:0:0") == 2 and len(store.rows("a")) == 20


def test_records_below_the_checkpoint_are_skipped() -> None:
    store = MemoryStore()
    worker = _worker(store)
    worker.start(0)
    records = _records(6)
    _feed(worker, records[:4])
    worker.checkpoint()
    again = _worker(store)
    assert again.start(0) == 4
    _feed(again, records)
    assert (again.stats.skipped, again.stats.records, again.next_offset) == (4, 2, 6)


def test_a_gap_stops_and_names_what_is_missing() -> None:
    worker = _worker(MemoryStore())
    worker.start(0)
    records = _records(5)
    _feed(worker, records[:2])
    with pytest.raises(OffsetGap, match=r"records 2 to 3 are missing \(2 records\).*committed offset is ahead of the store's checkpoint"):
        worker.handle(4, records[4].headers, records[4].value)


def test_a_first_record_above_the_log_start_without_any_checkpoint_stops() -> None:
    worker = _worker(MemoryStore())
    worker.start(0)
    record = _records(1)[0]
    with pytest.raises(OffsetGap, match="records 0 to 6 are missing"):
        worker.handle(7, record.headers, record.value)


def test_records_lost_to_retention_stop_at_start_and_can_be_passed_on_request() -> None:
    store = MemoryStore()
    worker = _worker(store)
    worker.start(0)
    _feed(worker, _records(2))
    worker.checkpoint()
    with pytest.raises(OffsetGap, match="records 2 to 8 are missing .*raise its retention"):
        _worker(store).start(9)
    dlq = ListSink()
    passing = _worker(store, dlq, skip_missing=True)
    assert passing.start(9) == 9
    passing.checkpoint()
    assert [row["reason"] for row in store.rows("dead_letter_raw")] == ["missing_records"]
    assert _worker(store).start(0) == 9


def test_a_shorter_or_another_log_is_refused() -> None:
    store = MemoryStore()
    worker = _worker(store, log_id="one")
    worker.start(0)
    _feed(worker, _records(3))
    worker.checkpoint()
    with pytest.raises(OffsetGap, match="checkpoint stands at offset 3 but the log ends at 2"):
        _worker(store, log_id="one").start(0, 2)
    with pytest.raises(OffsetGap, match="another log of this name"):
        _worker(store, log_id="two").start(0, 9)
    assert _worker(store, log_id="one").start(0, 3) == 3


def _bad_rows() -> tuple[Record, bytes]:
    """A record of three rows whose middle one says that more was hit than asked for."""
    batch = to_batch("access", [access(0), access(1, hit_tokens=10**6), access(2)])
    return encode("access", batch), encode("access", batch.slice(1, 1)).value


def test_a_bad_row_is_set_aside_and_its_neighbours_are_kept() -> None:
    store, dlq = MemoryStore(), ListSink()
    worker = _worker(store, dlq)
    worker.start(0)
    record, raw = _bad_rows()
    worker.handle(0, record.headers, record.value)
    worker.checkpoint()
    assert worker.stats.rows == 2 and worker.stats.bad_rows == 1
    (letter,) = dlq.raw
    assert letter[1]["kvtide.reason"] == b"hit_exceeds_prompt" and letter[1]["kvtide.offset"] == b"0" and letter[1]["kind"] == b"access"
    assert letter[2] == raw
    assert decode(letter[2], letter[1])[2][0].reason == "hit_exceeds_prompt", "a dead letter can be decoded again"
    (row,) = store.rows("dead_letter_raw")
    assert (row["topic"], row["partition"], row["offset"], row["reason"], row["raw"]) == ("t", 0, 0, "hit_exceeds_prompt", raw)


@pytest.mark.parametrize(
    ("headers", "value", "reason"),
    [
        ({"kind": b"access", "schema": b"1"}, b"\x00garbage", "not_arrow"),
        ({"kind": b"access", "schema": b"1"}, b"", "not_arrow"),
        ({"kind": b"riddle", "schema": b"1"}, b"x", "unknown_kind"),
        ({"kind": b"access", "schema": b"7"}, b"x", "unknown_schema"),
        ({}, b"x", "unknown_kind"),
        ({"kind": b"residency", "schema": b"1"}, _bad_rows()[0].value, "unknown_field"),
    ],
)
def test_an_unreadable_record_is_set_aside_with_its_bytes(headers: dict[str, bytes], value: bytes, reason: str) -> None:
    store, dlq = MemoryStore(), ListSink()
    worker = _worker(store, dlq)
    worker.start(0)
    worker.handle(0, headers, value)
    good = _records(1)[0]
    worker.handle(1, good.headers, good.value)
    assert worker.checkpoint() == 2
    assert worker.stats.bad_records == 1 and worker.stats.rows == 3
    (letter,) = dlq.raw
    assert (letter[1]["kvtide.reason"].decode(), letter[2]) == (reason, value)
    assert dlq.flushes == 1, "dead letters are safe before the checkpoint is"
    assert [(row["reason"], row["raw"]) for row in store.rows("dead_letter_raw")] == [(reason, value)]


def test_a_dead_letter_row_is_stored_once_through_a_crash() -> None:
    store = MemoryStore()
    writes = iter([False, False, True])
    store.doom = lambda: next(writes, False)
    record, _ = _bad_rows()
    for _ in range(2):
        worker = _worker(store)
        worker.start(0)
        worker.handle(0, record.headers, record.value)
        try:
            worker.checkpoint()
        except Crash:
            assert store.saved == {}
    assert len(store.rows("dead_letter_raw")) == 1


def test_too_many_bad_rows_among_the_last_thousand_stop_the_worker() -> None:
    worker = _worker(MemoryStore(), dlq_ratio=0.5)
    worker.start(0)
    for offset in range(500):
        worker.handle(offset, {}, b"junk")
    with pytest.raises(BadRowRatio, match="501 of the last 501 rows.*KVTIDE_DLQ_RATIO"):
        worker.handle(500, {}, b"junk")


def test_old_bad_rows_are_forgotten() -> None:
    worker = _worker(MemoryStore(), dlq_ratio=0.5)
    worker.start(0)
    good, offset = _records(1, rows=500)[0], 0
    for _ in range(3):
        for _ in range(400):
            worker.handle(offset, {}, b"junk")
            offset += 1
        for _ in range(2):
            worker.handle(offset, good.headers, good.value)
            offset += 1
    assert worker.stats.bad_records == 1200


def test_work_command_over_a_local_log(tmp_path: Path, store: Store, store_url: str) -> None:
    with LocalLog(tmp_path, "kv.events", 2) as log:
        batcher = Batcher(log, 2)
        for event in events(100):
            batcher.add(event)
        batcher.flush()
        records = batcher.records
    arguments = ["work", "--log", str(tmp_path), "--store", store_url, "--until-end", "--json"]
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert (printed["records"], printed["lag"]) == (records, 0)
    assert store.rows("SELECT count() AS n FROM access_raw") == [{"n": 100}]
    again = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert again["records"] == 0
    wrong = CliRunner().invoke(cli, [*arguments, "--partitions", "5"])
    assert isinstance(wrong.exception, UsageError) and "--partitions 2" in str(wrong.exception)


def test_local_loop_with_the_real_shard_gives_the_same_rows_however_often_it_is_stopped(tmp_path: Path, store: Store) -> None:
    """The real shard, log and store: stopping and starting again, with a checkpoint after almost every record, changes nothing."""
    with LocalLog(tmp_path, "kv.events", 3) as log:
        batcher = Batcher(log, 3, max_rows=20)
        for event in events(600):
            batcher.add(event)
        batcher.flush()
        calm = MemoryStore()
        run_local(log, calm, ShardConfig(), partitions=range(3))

        stops, rng = 0, random.Random(5)
        broken = MemoryStore()
        while any(broken.saved.get(("kv.events", p), (0,))[0] < log.end_offset(p) for p in range(3)):
            run_local(log, broken, ShardConfig(), stop=lambda: rng.random() < 0.3, checkpoint_s=0.0)
            stops += 1
        assert stops > 5
        assert broken.tables.keys() == calm.tables.keys() and len(calm.tables) > 3
        for table in calm.tables:
            assert sorted(broken.tables[table]) == sorted(calm.tables[table]), table

        result = run_local(log, store, ShardConfig())
        assert result.total("rows") == sum(worker.rows for worker in result.stats.values()) > 1000
        count = store.rows("SELECT count() AS n, uniqExact(request_id) AS distinct FROM access_raw")[0]
        assert count == {"n": len(calm.rows("access_raw")), "distinct": len(calm.rows("access_raw"))}
    assert LocalLog(tmp_path, "kv.dlq", read_only=True).end_offset(0) == 0
    assert Shard.restore(0, ShardConfig(), Shard(0, ShardConfig()).snapshot()).snapshot() == Shard(0, ShardConfig()).snapshot()
