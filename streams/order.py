"""Event-time order: rows wait here until no on-time row can come before them, and windows are cut from what is left behind.

The rule (docs/design.md section 4) gives every row an *effective time* from the rows that arrived before it, and nothing else, so the
order in which rows leave does not depend on how they were cut into records, nor on when a window is taken out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.events import KINDS, SCHEMAS, Kind

NEVER = int(np.iinfo(np.int64).min)
FAR = int(np.iinfo(np.int64).max)
_COLUMNS = ("batch", "effective_us", "late", "arrival", "offset")


@dataclass(frozen=True, slots=True)
class Pending:
    """Pending of one kind in arrival order. `effective_us` int64[n], `late` bool[n], `arrival` int64[n] (ordinal in the partition)."""

    batch: pa.RecordBatch
    effective_us: NDArray[np.int64]
    late: NDArray[np.bool_]
    arrival: NDArray[np.int64]
    offset: NDArray[np.uint64]

    def take(self, rows: NDArray[np.int64]) -> Pending:
        """The rows at some indices, in that order."""
        batch = self.batch.take(pa.array(rows))
        return Pending(batch, self.effective_us[rows], self.late[rows], self.arrival[rows], self.offset[rows])


@dataclass(slots=True)
class ReorderBuffer:
    """Pending rows of one partition, by kind; `grace_us` is how long rows may come out of order in event time."""

    grace_us: int
    max_ts_us: int = NEVER
    arrived: int = 0
    earliest_us: int | None = None
    pending: dict[Kind, list[Pending]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def watermark_us(self) -> int:
        """No on-time row at or before this time can still come."""
        return self.max_ts_us - self.grace_us if self.max_ts_us != NEVER else NEVER

    def add(self, kind: Kind, batch: pa.RecordBatch, offset: int) -> None:
        """Append a record's rows. Cost: O(rows), vectorised."""
        n = batch.num_rows
        if n == 0:
            return
        ts = batch.column("ts_us").to_numpy()
        before = np.concatenate(([self.max_ts_us], np.maximum(np.maximum.accumulate(ts[:-1]), self.max_ts_us)))
        # The watermark just before each row; with no row yet there is none, and nothing can be late.
        mark = np.where(before == NEVER, NEVER, before - self.grace_us)
        late = ts <= mark
        arrival = np.arange(self.arrived, self.arrived + n, dtype=np.int64)
        rows = Pending(batch, np.where(late, mark, ts), late, arrival, np.full(n, offset, np.uint64))
        self.pending[kind].append(rows)
        self.earliest_us = min(int(rows.effective_us.min()), FAR if self.earliest_us is None else self.earliest_us)
        self.max_ts_us = max(self.max_ts_us, int(ts.max()))
        self.arrived += n

    def take(self, until_us: int) -> dict[Kind, Pending]:
        """Remove and return all rows with an effective time below `until_us`, by kind, each in arrival order."""
        taken: dict[Kind, Pending] = {}
        for kind in KINDS:
            out, stay = [], []
            for rows in self.pending[kind]:
                mask = rows.effective_us < until_us
                if mask.all():
                    out.append(rows)
                elif mask.any():
                    out.append(rows.take(np.flatnonzero(mask)))
                    stay.append(rows.take(np.flatnonzero(~mask)))
                else:
                    stay.append(rows)
            self.pending[kind] = stay
            taken[kind] = join(kind, out)
        times = [int(rows.effective_us.min()) for chunks in self.pending.values() for rows in chunks]
        self.earliest_us = min(times, default=None)
        return taken

    def state(self) -> dict[str, Any]:
        """Pending rows and counters, for a checkpoint."""
        rows = {kind: join(kind, self.pending[kind]) for kind in KINDS}
        columns = {kind: {name: getattr(rows[kind], name) for name in _COLUMNS} for kind in KINDS}
        return {"max_ts_us": self.max_ts_us, "arrived": self.arrived, "pending": columns}

    @classmethod
    def from_state(cls, grace_us: int, state: dict[str, Any]) -> ReorderBuffer:
        buffer = cls(grace_us, state["max_ts_us"], state["arrived"])
        for kind in KINDS:
            rows = Pending(**state["pending"][kind])
            if len(rows.arrival):
                buffer.pending[kind] = [rows]
                earliest = FAR if buffer.earliest_us is None else buffer.earliest_us
                buffer.earliest_us = min(int(rows.effective_us.min()), earliest)
        return buffer


def join(kind: Kind, chunks: list[Pending]) -> Pending:
    """One `Pending` from many, in the given order."""
    if not chunks:
        empty = pa.RecordBatch.from_pylist([], schema=SCHEMAS[kind])
        none = np.zeros(0, np.int64)
        return Pending(empty, none, np.zeros(0, np.bool_), none, np.zeros(0, np.uint64))
    table = pa.Table.from_batches([rows.batch for rows in chunks]).combine_chunks()
    return Pending(
        table.to_batches()[0],
        np.concatenate([rows.effective_us for rows in chunks]),
        np.concatenate([rows.late for rows in chunks]),
        np.concatenate([rows.arrival for rows in chunks]),
        np.concatenate([rows.offset for rows in chunks]),
    )


def application_order(taken: dict[Kind, Pending]) -> dict[Kind, NDArray[np.int64]]:
    """Rank of every row in the one sequence in which all kinds' rows are applied.

    On-time rows go by (effective time, source, seq), late rows after the on-time ones of their effective time, by arrival.
    Ties of a broken source (equal source and seq) fall back to arrival. Cost: one lexsort over the rows.
    """
    sources = pa.chunked_array([taken[kind].batch.column("source") for kind in KINDS], pa.string()).combine_chunks()
    encoded = sources.dictionary_encode()
    names = np.array(encoded.dictionary.to_pylist(), dtype=object)
    rank = np.empty(len(names), np.int64)
    rank[np.argsort(names)] = np.arange(len(names))
    source = rank[encoded.indices.to_numpy()] if len(names) else np.zeros(0, np.int64)
    seq = np.concatenate([taken[kind].batch.column("seq").to_numpy() for kind in KINDS])
    effective = np.concatenate([taken[kind].effective_us for kind in KINDS])
    late = np.concatenate([taken[kind].late for kind in KINDS])
    arrival = np.concatenate([taken[kind].arrival for kind in KINDS])
    order = np.lexsort((arrival, np.where(late, 0, seq), np.where(late, 0, source), late, effective))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    cuts = np.cumsum([len(taken[kind].arrival) for kind in KINDS])[:-1]
    return dict(zip(KINDS, np.split(position, cuts), strict=True))
