"""One partition's worker: restores its shard, applies records in order, sets bad ones aside, and makes checkpoints.

It knows neither Kafka nor Faust nor threads; `streams/app.py` and `streams/local.py` carry records to it. All effects go through the store,
the dead-letter sink and the clock that it is given.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import pyarrow as pa

from ingest.errors import InvalidRecord, KvtideError
from ingest.events import DLQ_TOPIC, Kind, decode
from streams.shard import Shard, ShardConfig
from streams.windows import Rows

RATIO_ROWS = 1000
MAX_WAITING_ROWS = 200_000  # rows of closed windows in memory that make a checkpoint due before its time
_MAGIC = b"kvtide-checkpoint-1\n"
_log = logging.getLogger("kvtide.worker")


class OffsetGap(KvtideError):
    """Records between the checkpoint and the first record that arrived are missing, or the log is not the one of the checkpoint."""


class BadRowRatio(KvtideError):
    """Too many of the latest rows break the contract: the producer, not a row, is at fault."""


class StorePort(Protocol):
    """What a worker needs of `ingest.store.Store`."""

    def insert(self, table: str, data: pa.Table, token: str | None = None) -> None: ...

    def save_checkpoint(self, topic: str, partition: int, next_offset: int, state: bytes) -> None: ...

    def load_checkpoint(self, topic: str, partition: int) -> tuple[int, bytes] | None: ...


class DeadLetterPort(Protocol):
    """Where unreadable bytes go: a `KafkaSink` or `LocalLog` of topic kv.dlq."""

    def append_raw(self, partition: int, headers: Mapping[str, bytes], value: bytes) -> None: ...

    def flush(self) -> None: ...


class ShardPort(Protocol):
    """What a worker needs of `streams.shard.Shard`."""

    def apply(self, kind: Kind, batch: pa.RecordBatch, offset: int) -> list[Rows]: ...

    def snapshot(self) -> bytes: ...


class ShardFactory(Protocol):
    """A shard class: called for a new shard, `restore` for one from a snapshot."""

    def __call__(self, partition: int, config: ShardConfig) -> ShardPort: ...

    def restore(self, partition: int, config: ShardConfig, data: bytes) -> ShardPort: ...


@dataclass(slots=True)
class Stats:
    """Counters of one worker since it started, and the offsets of its next record, its last checkpoint, and the log's end as last seen."""

    records: int = 0
    rows: int = 0
    bad_records: int = 0
    bad_rows: int = 0
    late_rows: int = 0
    skipped: int = 0
    windows: int = 0
    inserted_rows: int = 0
    checkpoints: int = 0
    next_offset: int = 0
    checkpoint_offset: int = 0
    end_offset: int = 0

    @property
    def lag(self) -> int:
        """Records between the last checkpoint and the end of the log as last seen."""
        return max(0, self.end_offset - self.checkpoint_offset)

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "lag": self.lag}


class PartitionWorker:
    """Applies one partition's records to its shard, effectively once.

    `checkpoint_s` is the time between checkpoints, `dlq_ratio` the share of bad rows among the last 1000 above which it stops. `log_id`
    names the log (a topic's or local log's own id): a checkpoint of another log is refused. With `skip_missing` a gap is recorded as a
    dead letter and passed instead of stopping the worker.
    """

    def __init__(
        self,
        partition: int,
        topic: str,
        store: StorePort,
        shard_config: ShardConfig,
        dlq: DeadLetterPort,
        clock: Callable[[], float],
        checkpoint_s: float = 5.0,
        shard_factory: ShardFactory = Shard,
        *,
        dlq_ratio: float = 0.5,
        log_id: str = "",
        skip_missing: bool = False,
    ) -> None:
        self.partition, self.topic = partition, topic
        self.stats = Stats()
        self._store, self._dlq, self._clock = store, dlq, clock
        self._config, self._factory = shard_config, shard_factory
        self._checkpoint_s, self._dlq_ratio = checkpoint_s, dlq_ratio
        self._log_id, self._skip_missing = log_id, skip_missing
        self._shard: ShardPort | None = None
        self._waiting: list[Rows] = []
        self._waiting_rows = 0
        self._letters: list[tuple[str, pa.Table]] = []
        self._recent: deque[bool] = deque(maxlen=RATIO_ROWS)  # True for a bad row
        self._checkpoint_at = clock()

    @property
    def next_offset(self) -> int:
        """Offset of the next record to apply."""
        return self.stats.next_offset

    @property
    def dirty(self) -> bool:
        """Whether anything was applied since the last checkpoint."""
        return self.stats.next_offset != self.stats.checkpoint_offset

    def start(self, first_available_offset: int, end_offset: int | None = None) -> int:
        """Restore the newest checkpoint, or begin at the log's first offset; returns the next expected offset.

        Raises `OffsetGap` when the log no longer holds the next record, ends before it, or is another log.
        """
        found = self._store.load_checkpoint(self.topic, self.partition)
        if found is None:
            self._shard, expected = self._factory(self.partition, self._config), first_available_offset
        else:
            expected, state = found
            self._shard = self._factory.restore(self.partition, self._config, self._of_this_log(state))
        if end_offset is not None and expected > end_offset:
            raise OffsetGap(
                f"{self._where()}: the checkpoint stands at offset {expected} but the log ends at {end_offset}; the store belongs to an "
                "older log of this name: use a new store (--store), or another topic or folder"
            )
        self.stats.next_offset = self.stats.checkpoint_offset = expected
        self.stats.end_offset = expected if end_offset is None else end_offset
        if first_available_offset > expected:
            self._gap(expected, first_available_offset, "the log has already deleted them: raise its retention")
        self._checkpoint_at = self._clock()
        return self.stats.next_offset

    def handle(self, offset: int, headers: Mapping[str, bytes], value: bytes) -> None:
        """Apply one record, or skip it when the checkpoint already holds it.

        Bad records and rows are set aside and do not stop their neighbours. Raises `OffsetGap` for a missing record and `BadRowRatio`.
        """
        assert self._shard is not None, "start() comes first"
        self.stats.end_offset = max(self.stats.end_offset, offset + 1)
        if offset < self.stats.next_offset:
            self.stats.skipped += 1
            return
        if offset > self.stats.next_offset:
            self._gap(
                self.stats.next_offset,
                offset,
                "the group's committed offset is ahead of the store's checkpoint: point --store at the store these records went to, "
                "or reset the group's offsets to the checkpoint (kafka-consumer-groups.sh --reset-offsets) or use another KVTIDE_GROUP",
            )
        try:
            kind, batch, rejected = decode(value, headers)
        except InvalidRecord as error:
            self.stats.bad_records += 1
            self._set_aside(offset, headers, [error])
            self._recent.append(True)
        else:
            if rejected:
                self._set_aside(offset, headers, rejected)
            self._recent.extend([True] * len(rejected) + [False] * batch.num_rows)
            self.stats.bad_rows += len(rejected)
            self._apply(kind, batch, offset)
        self.stats.records += 1
        self.stats.next_offset = offset + 1
        self._stop_above_ratio()

    def due(self, now: float) -> bool:
        """Whether a checkpoint should be made: something new was applied and it is time, or many rows wait."""
        return self.dirty and (now - self._checkpoint_at >= self._checkpoint_s or self._waiting_rows >= MAX_WAITING_ROWS)

    def checkpoint(self) -> int:
        """Insert the closed windows, write the state, and return the offset below which everything may be acknowledged.

        The order makes a crash at any point harmless: a repeated insert is dropped by its token, an unwritten state is computed again.
        """
        assert self._shard is not None, "start() comes first"
        if self.dirty:
            for rows in self._waiting:
                self._store.insert(rows.table, rows.data, f"{rows.table}:{self.topic}:{self.partition}:{rows.key}")
                self.stats.inserted_rows += rows.data.num_rows
            for token, letters in self._letters:
                self._store.insert("dead_letter_raw", letters, token)
            if self._letters:
                self._dlq.flush()
            state = _MAGIC + self._log_id.encode() + b"\n" + self._shard.snapshot()
            self._store.save_checkpoint(self.topic, self.partition, self.stats.next_offset, state)
            self._waiting, self._waiting_rows, self._letters = [], 0, []
            self.stats.checkpoint_offset = self.stats.next_offset
            self.stats.checkpoints += 1
        self._checkpoint_at = self._clock()
        return self.stats.checkpoint_offset

    def _apply(self, kind: Kind, batch: pa.RecordBatch, offset: int) -> None:
        assert self._shard is not None
        closed = self._shard.apply(kind, batch, offset)
        self._waiting += closed
        self._waiting_rows += sum(rows.data.num_rows for rows in closed)
        self.stats.windows += len({rows.key for rows in closed})
        self.stats.rows += batch.num_rows
        self.stats.late_rows = getattr(self._shard, "late_rows", 0)

    def _set_aside(self, offset: int, headers: Mapping[str, bytes], errors: list[InvalidRecord]) -> None:
        """Bad bytes go to kv.dlq at once and to dead_letter_raw with the next checkpoint: one insert per record, since its bad rows are
        always the same ones."""
        for row, error in enumerate(errors):
            about = {
                "reason": error.reason,
                "detail": str(error),
                "topic": self.topic,
                "partition": self.partition,
                "offset": offset,
                "row": row,
            }
            letter: dict[str, bytes] = {f"kvtide.{name}": str(item).encode() for name, item in about.items()}
            self._dlq.append_raw(0, {**headers, **letter}, error.raw)
        columns: dict[str, Any] = {
            "at": pa.array([round(self._clock() * 1e6)] * len(errors), pa.int64()),
            "topic": [self.topic] * len(errors),
            "partition": pa.array([self.partition] * len(errors), pa.uint16()),
            "offset": pa.array([offset] * len(errors), pa.uint64()),
            "reason": [error.reason for error in errors],
            "detail": [str(error) for error in errors],
            "raw": pa.array([error.raw for error in errors], pa.binary()),
        }
        self._letters.append((f"dead_letter_raw:{self.topic}:{self.partition}:{offset}", pa.table(columns)))

    def _stop_above_ratio(self) -> None:
        bad = sum(self._recent)
        if bad > self._dlq_ratio * RATIO_ROWS:
            raise BadRowRatio(
                f"{self._where()}: {bad} of the last {len(self._recent)} rows break the contract "
                f"(limit {self._dlq_ratio:.0%} of {RATIO_ROWS}); "
                f"see their reasons in {DLQ_TOPIC} or dead_letter_raw, mend the producer, or raise KVTIDE_DLQ_RATIO"
            )

    def _gap(self, expected: int, found: int, mend: str) -> None:
        missing = f"{self._where()}: records {expected} to {found - 1} are missing ({found - expected} records)"
        if not self._skip_missing:
            raise OffsetGap(f"{missing}; {mend}; or pass --skip-missing to go on without them")
        _log.warning("%s; going on without them", missing)
        self._set_aside(expected, {}, [InvalidRecord("missing_records", missing, b"")])
        self.stats.next_offset = found

    def _of_this_log(self, state: bytes) -> bytes:
        if not state.startswith(_MAGIC):
            raise OffsetGap(f"{self._where()}: the checkpoint was written by another version of kvtide; use a new store (--store)")
        log_id, snapshot = state[len(_MAGIC) :].split(b"\n", 1)
        if self._log_id and log_id and log_id.decode() != self._log_id:
            raise OffsetGap(
                f"{self._where()}: the store holds windows and a checkpoint of another log of this name (id {log_id.decode()}, this log is "
                f"{self._log_id}); use a new store (--store) for the new log"
            )
        return snapshot

    def _where(self) -> str:
        return f"{self.topic} partition {self.partition}"
