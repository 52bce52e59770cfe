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
from streams.codes import coded

NEVER = int(np.iinfo(np.int64).min)
FAR = int(np.iinfo(np.int64).max)
LOW_CARDINALITY = frozenset(
    ("source", "tenant", "model", "instance", "category", "kind", "tier", "reason", "cause_tenant", "router", "outcome", "lifecycle",
     "source_state")
)  # fmt: skip
_COLUMNS = ("batch", "effective_us", "late", "arrival", "offset")


@dataclass(frozen=True, slots=True)
class Pending:
    """Rows of one kind. `effective_us` int64[n], `late` bool[n], `arrival` int64[n] (ordinal in the partition), `offset` uint64[n] of the
    record that brought each."""

    batch: pa.RecordBatch
    effective_us: NDArray[np.int64]
    late: NDArray[np.bool_]
    arrival: NDArray[np.int64]
    offset: NDArray[np.uint64]

    def take(self, rows: NDArray[np.int64]) -> Pending:
        """The rows at some indices, in that order."""
        batch = self.batch.take(pa.array(rows))
        return Pending(batch, self.effective_us[rows], self.late[rows], self.arrival[rows], self.offset[rows])


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one record brought, as cheaply as it can be kept: `late` and `rows` (ordinals in the record) are None for none and all."""

    batch: pa.RecordBatch
    effective_us: NDArray[np.int64]
    first_us: int
    last_us: int
    late: NDArray[np.bool_] | None
    arrival: int  # of the record's first row
    offset: int
    rows: NDArray[np.int64] | None = None

    def where(self, mask: NDArray[np.bool_]) -> _Piece:
        kept = np.flatnonzero(mask)
        effective = self.effective_us[kept]
        late = None if self.late is None else self.late[kept]
        rows = kept if self.rows is None else self.rows[kept]
        ends = int(effective.min()), int(effective.max())
        return _Piece(self.batch.take(pa.array(kept)), effective, *ends, late, self.arrival, self.offset, rows)


@dataclass(slots=True)
class ReorderBuffer:
    """Pending rows of one partition, by kind; `grace_us` is how long rows may come out of order in event time."""

    grace_us: int
    max_ts_us: int = NEVER
    arrived: int = 0
    late_rows: int = 0
    earliest_us: int | None = None
    pending: dict[Kind, list[_Piece]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    @property
    def watermark_us(self) -> int:
        """No on-time row at or before this time can still come."""
        return self.max_ts_us - self.grace_us if self.max_ts_us != NEVER else NEVER

    def add(self, kind: Kind, batch: pa.RecordBatch, offset: int) -> None:
        """Append a record's rows. Cost: two reductions over the times, unless a row is late."""
        n = batch.num_rows
        if n == 0:
            return
        ts = batch.column("ts_us").to_numpy()
        first, last = int(ts.min()), int(ts.max())
        late, effective = None, ts
        if first <= max(self.max_ts_us, last) - self.grace_us:
            late, effective = self._lateness(ts)
            self.late_rows += 0 if late is None else int(late.sum())
            first, last = int(effective.min()), int(effective.max())
        self.pending[kind].append(_Piece(batch, effective, first, last, late, self.arrived, offset))
        self.earliest_us = min(first, FAR if self.earliest_us is None else self.earliest_us)
        self.max_ts_us = max(self.max_ts_us, int(ts.max()))
        self.arrived += n

    def _lateness(self, ts: NDArray[np.int64]) -> tuple[NDArray[np.bool_] | None, NDArray[np.int64]]:
        """Which rows are late, and effective times: a late row takes the watermark as it stood just before the row."""
        before = np.concatenate(([self.max_ts_us], np.maximum(np.maximum.accumulate(ts[:-1]), self.max_ts_us)))
        # With no row before it there is no watermark, and nothing can be late.
        mark = np.where(before == NEVER, NEVER, before - self.grace_us)
        late = ts <= mark
        return (late, np.where(late, mark, ts)) if late.any() else (None, ts)

    def take(self, until_us: int) -> dict[Kind, Pending]:
        """Remove and return all rows with an effective time below `until_us`, by kind, each in arrival order."""
        taken: dict[Kind, Pending] = {}
        for kind in KINDS:
            out, stay = [], []
            for piece in self.pending[kind]:
                if piece.last_us < until_us:
                    out.append(piece)
                elif piece.first_us >= until_us:
                    stay.append(piece)
                else:
                    mask = piece.effective_us < until_us
                    out.append(piece.where(mask))
                    stay.append(piece.where(~mask))
            self.pending[kind] = stay
            taken[kind] = _encoded(_join(kind, out))
        self.earliest_us = min((piece.first_us for pieces in self.pending.values() for piece in pieces), default=None)
        return taken

    def state(self) -> dict[str, Any]:
        """Pending rows and counters, for a checkpoint."""
        rows = {kind: _join(kind, self.pending[kind]) for kind in KINDS}
        columns = {kind: {name: getattr(rows[kind], name) for name in _COLUMNS} for kind in KINDS}
        return {"max_ts_us": self.max_ts_us, "arrived": self.arrived, "late_rows": self.late_rows, "pending": columns}

    @classmethod
    def from_state(cls, grace_us: int, state: dict[str, Any]) -> ReorderBuffer:
        buffer = cls(grace_us, state["max_ts_us"], state["arrived"], state["late_rows"])
        for kind in KINDS:
            buffer.pending[kind] = _pieces(Pending(**state["pending"][kind]))
        buffer.earliest_us = min((piece.first_us for pieces in buffer.pending.values() for piece in pieces), default=None)
        return buffer


def _encoded(rows: Pending) -> Pending:
    """The rows with their low-cardinality strings dictionary-encoded, once for all who group by them."""
    columns = [
        column.dictionary_encode() if name in LOW_CARDINALITY else column
        for name, column in zip(rows.batch.schema.names, rows.batch.columns, strict=True)
    ]
    batch = pa.RecordBatch.from_arrays(columns, names=rows.batch.schema.names)
    return Pending(batch, rows.effective_us, rows.late, rows.arrival, rows.offset)


def _pieces(rows: Pending) -> list[_Piece]:
    """Pieces of joined rows again, one a record."""
    cuts = np.flatnonzero(np.diff(rows.offset)) + 1
    pieces = []
    for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows.offset)], strict=True):
        if end > begin:
            effective, late = rows.effective_us[begin:end], rows.late[begin:end]
            ends = int(effective.min()), int(effective.max())
            within = rows.arrival[begin:end] - rows.arrival[begin]
            batch = rows.batch.slice(begin, end - begin)
            some = late if late.any() else None
            pieces.append(_Piece(batch, effective, *ends, some, int(rows.arrival[begin]), int(rows.offset[begin]), within))
    return pieces


def _join(kind: Kind, pieces: list[_Piece]) -> Pending:
    """One `Pending` from many pieces, in the given order."""
    if not pieces:
        empty = pa.RecordBatch.from_pylist([], schema=SCHEMAS[kind])
        none = np.zeros(0, np.int64)
        return Pending(empty, none, np.zeros(0, np.bool_), none, np.zeros(0, np.uint64))
    sizes = [piece.batch.num_rows for piece in pieces]
    return Pending(
        pa.Table.from_batches([piece.batch for piece in pieces]).combine_chunks().to_batches()[0],
        np.concatenate([piece.effective_us for piece in pieces]),
        np.concatenate([np.zeros(n, np.bool_) if piece.late is None else piece.late for piece, n in zip(pieces, sizes, strict=True)]),
        np.concatenate(
            [piece.arrival + (np.arange(n) if piece.rows is None else piece.rows) for piece, n in zip(pieces, sizes, strict=True)]
        ),
        np.repeat(np.array([piece.offset for piece in pieces], np.uint64), sizes),
    )


def application_order(taken: dict[Kind, Pending]) -> dict[Kind, NDArray[np.int64]]:
    """Rank of every row in the one sequence in which all kinds' rows are applied.

    On-time rows go by (effective time, source, seq), late rows after the on-time ones of their effective time, by arrival.
    Ties of a broken source (equal source and seq) fall back to arrival. Cost: one lexsort over the rows.
    """
    sources = [coded(taken[kind].batch.column("source")) for kind in KINDS]
    place = {name: i for i, name in enumerate(sorted({name for _, names in sources for name in names}))}
    source = np.concatenate([np.array([place[name] for name in names] or [0], np.int64)[codes] for codes, names in sources])
    seq = np.concatenate([taken[kind].batch.column("seq").to_numpy() for kind in KINDS])
    effective = np.concatenate([taken[kind].effective_us for kind in KINDS])
    late = np.concatenate([taken[kind].late for kind in KINDS])
    arrival = np.concatenate([taken[kind].arrival for kind in KINDS])
    order = np.lexsort((arrival, np.where(late, 0, seq), np.where(late, 0, source), late, effective))
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    cuts = np.cumsum([len(taken[kind].arrival) for kind in KINDS])[:-1]
    return dict(zip(KINDS, np.split(position, cuts), strict=True))
