"""Packing events into records: one open batch per partition and kind, cut by rows, bytes and age, all kinds of a partition together.

Where cuts fall depends only on the sequence of rows and of `advance` calls, never on how many rows a call brought.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.events import KINDS, SCHEMAS, STRUCTS, Access, Instance, Kind, Record, encode, partition_of, to_batch

LINGER_LIVE_S = 0.2
LINGER_REPLAY_S = 2.0
# Bytes of a packed row without its chain, by measurement of typical rows; a chain adds 8 bytes a block.
_ROW_BYTES: dict[Kind, int] = {"access": 240, "residency": 100, "instance": 160}
_KIND_OF: dict[type[msgspec.Struct], Kind] = {struct: kind for kind, struct in STRUCTS.items()}


class EventSink(Protocol):
    """Where records go: Kafka, a local log, or a list in a test."""

    def append(self, partition: int, record: Record) -> None:
        """Queue one record for a partition, in order."""

    def flush(self) -> None:
        """Return when everything appended is safely written; raises `KvtideError` if anything was lost."""

    def close(self) -> None:
        """Flush and release."""


@dataclass
class _Open:
    """Rows of one partition that no record holds yet."""

    parts: dict[Kind, list[pa.RecordBatch | msgspec.Struct]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    rows: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    bytes: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    since_us: int | None = None  # oldest row's event time, or wall time of the first row


class Batcher:
    """Packs rows into records by tenant and hands them to `sink`.

    `clock` None means event time: a row's own `ts_us` tells the time of its partition, and `advance` takes event time. Otherwise it
    returns wall seconds, and the age of an open batch counts from the call that brought its first row; call `advance` every few
    `linger_s`. Rows of different kinds must be added in step: a kind that runs ahead of another by more than the shard's grace makes
    the other's rows late. Cost: a few vectorised passes over a batch; `add` is O(chain) and packs its rows when they are cut.
    """

    def __init__(
        self,
        sink: EventSink,
        partitions: int,
        *,
        max_rows: int = 500,
        max_bytes: int = 512 * 1024,
        linger_s: float = LINGER_REPLAY_S,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._sink, self._partitions = sink, partitions
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._linger_us = round(linger_s * 1e6)
        self._clock = clock
        self._open = [_Open() for _ in range(partitions)]
        self._owner: dict[str, int] = {}
        self.rows = 0
        self.records = 0

    def add(self, event: msgspec.Struct) -> None:
        """Add one event struct; an `Instance` goes to every partition."""
        kind = _KIND_OF[type(event)]
        size = _ROW_BYTES[kind] + (8 * len(event.chain) if isinstance(event, Access) else 0)
        ts_us: int = event.ts_us  # type: ignore[attr-defined]
        targets: Iterable[int]
        targets = range(self._partitions) if isinstance(event, Instance) else (self._partition_of(event.tenant),)  # type: ignore[attr-defined]
        for partition in targets:
            opened = self._open[partition]
            if self._clock is None and opened.since_us is not None and ts_us - opened.since_us > self._linger_us:
                self._cut(partition)
            self._keep(partition, kind, event, 1, size, ts_us)
            if opened.rows[kind] >= self._max_rows or opened.bytes[kind] >= self._max_bytes:
                self._cut(partition)
        self.rows += 1

    def add_batch(self, kind: Kind, batch: pa.RecordBatch) -> None:
        """Add columns of one kind in row order; `instance` rows go to every partition."""
        if batch.num_rows == 0:
            return
        batch = _typed(kind, batch)
        self.rows += batch.num_rows
        if kind == "instance":
            for partition in range(self._partitions):
                self._add_rows(partition, kind, batch)
            return
        owners = self._owners(batch.column("tenant"))
        present, counts = np.unique(owners, return_counts=True)
        if len(present) > 1:  # one gather for all partitions, then slices; a stable sort keeps each one's row order
            batch = batch.take(pa.array(np.argsort(owners, kind="stable")))
        for partition, start, count in zip(present, np.cumsum(counts) - counts, counts, strict=True):
            self._add_rows(int(partition), kind, batch.slice(int(start), int(count)))

    def advance(self, now_s: float | None = None) -> None:
        """Cut every open batch older than the linger at `now_s` (event seconds without a clock, else wall seconds; default: the clock)."""
        if now_s is None:
            if self._clock is None:
                raise ValueError("a batcher in event time has no clock: pass now_s")
            now_s = self._clock()
        now_us = round(now_s * 1e6)
        for partition, opened in enumerate(self._open):
            if opened.since_us is not None and now_us - opened.since_us >= self._linger_us:
                self._cut(partition)

    def flush(self) -> None:
        """Cut everything that is open and flush the sink."""
        for partition in range(self._partitions):
            self._cut(partition)
        self._sink.flush()

    def _partition_of(self, tenant: str) -> int:
        owner = self._owner.get(tenant)
        if owner is None:
            owner = self._owner[tenant] = partition_of(tenant, self._partitions)
        return owner

    def _owners(self, tenants: pa.Array) -> npt.NDArray[np.int64]:
        coded = tenants.dictionary_encode()
        by_code = np.array([self._partition_of(tenant) for tenant in coded.dictionary.to_pylist()], dtype=np.int64)
        return by_code[coded.indices.to_numpy(zero_copy_only=False)]

    def _add_rows(self, partition: int, kind: Kind, batch: pa.RecordBatch) -> None:
        ts_us = batch.column("ts_us").to_numpy(zero_copy_only=False)
        sizes = np.full(batch.num_rows, _ROW_BYTES[kind], dtype=np.int64)
        if kind == "access":
            sizes += 8 * pc.list_value_length(batch.column("chain")).to_numpy(zero_copy_only=False).astype(np.int64)
        opened, start = self._open[partition], 0
        while start < batch.num_rows:
            if self._clock is None and opened.since_us is not None and ts_us[start] - opened.since_us > self._linger_us:
                self._cut(partition)
            count = self._fitting(opened, kind, ts_us[start:], sizes[start:])
            part = slice(start, start + count)
            self._keep(partition, kind, batch.slice(start, count), count, int(sizes[part].sum()), int(ts_us[part].min()))
            if opened.rows[kind] >= self._max_rows or opened.bytes[kind] >= self._max_bytes:
                self._cut(partition)
            start += count

    def _fitting(self, opened: _Open, kind: Kind, ts_us: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> int:
        """How many leading rows join the open batch before the next cut: at least one."""
        room = self._max_rows - opened.rows[kind]
        ts_us, sizes = ts_us[:room], sizes[:room]
        full = np.searchsorted(np.cumsum(sizes), self._max_bytes - opened.bytes[kind])
        count = min(len(ts_us), int(full) + 1)
        if self._clock is not None or count == 1:
            return count
        oldest = np.minimum.accumulate(ts_us[:count])
        if opened.since_us is not None:
            oldest = np.minimum(oldest, opened.since_us)
        aged = np.flatnonzero(ts_us[1:count] - oldest[:-1] > self._linger_us)
        return int(aged[0]) + 1 if len(aged) else count

    def _keep(self, partition: int, kind: Kind, part: pa.RecordBatch | msgspec.Struct, rows: int, size: int, ts_us: int) -> None:
        opened = self._open[partition]
        opened.parts[kind].append(part)
        opened.rows[kind] += rows
        opened.bytes[kind] += size
        if self._clock is None:
            opened.since_us = ts_us if opened.since_us is None else min(opened.since_us, ts_us)
        elif opened.since_us is None:
            opened.since_us = round(self._clock() * 1e6)

    def _cut(self, partition: int) -> None:
        opened = self._open[partition]
        if opened.since_us is None:
            return
        for kind in KINDS:
            if opened.rows[kind]:
                self._sink.append(partition, encode(kind, _joined(kind, opened.parts[kind])))
                self.records += 1
            opened.parts[kind] = []
            opened.rows[kind] = opened.bytes[kind] = 0
        opened.since_us = None


def _joined(kind: Kind, parts: list[pa.RecordBatch | msgspec.Struct]) -> pa.RecordBatch:
    """One batch of a list of batches and single structs, in order."""
    batches: list[pa.RecordBatch] = []
    structs: list[msgspec.Struct] = []
    for part in parts:
        if isinstance(part, msgspec.Struct):
            structs.append(part)
            continue
        if structs:
            batches.append(to_batch(kind, structs))
            structs = []
        batches.append(part)
    if structs:
        batches.append(to_batch(kind, structs))
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _typed(kind: Kind, batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with the contract's columns in its order and types."""
    schema = SCHEMAS[kind]
    columns = [batch.column(name) for name in schema.names]
    fitted = [column if column.type == field.type else column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(fitted, schema=schema)
