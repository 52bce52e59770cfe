"""The instances of the fleet as one shard knows them: bits, incarnations, capacity, and the lifecycle steps inside a window.

Engines restart without saying so, and logs name instances that nobody announced. Both are turned into explicit steps here, in the order
in which rows are applied, so that the cause tables only ever see well-formed lifecycles.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ingest.events import Kind
from streams.causes import OP_DOWN, OP_DRAIN, OP_GAP, OP_LIVE, OP_MUTE, OP_REPORTS, OP_UP, Fleet
from streams.codes import coded
from streams.order import Pending


@dataclass(frozen=True, slots=True)
class Steps:
    """Lifecycle steps of a window. `rank` sorts among twice the rows' ranks: odd values stand just before a row."""

    rank: NDArray[np.int64]
    op: NDArray[np.uint8]
    instance: NDArray[np.int32]
    incarnation: NDArray[np.int64]
    ts_us: NDArray[np.int64]

    @property
    def any_down(self) -> bool:
        return bool((self.op == OP_DOWN).any())


@dataclass(slots=True)
class Instances:
    """Names (their index is the bit) and state, as of the last closed window."""

    names: list[str] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    gap: list[int] = field(default_factory=list)
    reports: list[int] = field(default_factory=list)
    incarnation: list[int] = field(default_factory=list)
    capacity_blocks: list[int] = field(default_factory=list)

    def code(self, name: str) -> int:
        """Bit of an instance, newly given if it was never heard of."""
        if name not in self.names:
            self.names.append(name)
            self.up.append(0)
            self.gap.append(0)
            self.reports.append(0)
            self.incarnation.append(-1)
            self.capacity_blocks.append(0)
        return self.names.index(name)

    def state(self) -> dict[str, list[Any]]:
        """Columns for a checkpoint."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, list[Any]]) -> Instances:
        return cls(**{name: list(column) for name, column in state.items()})

    def fleet(self) -> Fleet:
        """Arrays for the cause kernels, a fresh copy."""
        up, gap, reports = (np.array(column, np.uint8) for column in (self.up, self.gap, self.reports))
        return Fleet(up, gap, reports, np.array(self.incarnation, np.int64), np.zeros(1, np.int64))

    def codes(self, column: pa.Array) -> NDArray[np.int64]:
        """Bits of a string column."""
        codes, names = coded(column)
        return np.array([*(self.code(name) for name in names), -1], np.int64)[codes]

    def advance(self, taken: dict[Kind, Pending], rank: dict[Kind, NDArray[np.int64]]) -> Steps:
        """Go through a window's rows and return its lifecycle steps; the state is then that at the window's end.

        Cost: a Python step per instance row; rows of the other kinds are looked at only where an instance is new or restarted.
        """
        events = [(2 * int(rank["instance"][i]), row) for i, row in enumerate(_instance_rows(taken["instance"]))]
        events += self._unannounced(taken, rank, "access") + self._unannounced(taken, rank, "residency")
        steps: list[tuple[int, int, int, int, int]] = []
        for position, row in sorted(events, key=lambda event: event[0]):
            steps += [(position, op, i, life, ts_us) for op, i, life, ts_us in self._step(row)]
        columns = list(zip(*steps, strict=True)) or [()] * 5
        types = (np.int64, np.uint8, np.int32, np.int64, np.int64)
        return Steps(*(np.array(column, type_) for column, type_ in zip(columns, types, strict=True)))

    def _unannounced(
        self, taken: dict[Kind, Pending], rank: dict[Kind, NDArray[np.int64]], kind: Kind
    ) -> list[tuple[int, dict[str, object]]]:
        """First row of every (instance, incarnation) that is newer than what is known, as an implied `up` just before it."""
        rows = taken[kind]
        if not len(rows.arrival):
            return []
        code = self.codes(rows.batch.column("instance"))
        incarnation = rows.batch.column("incarnation").to_numpy().astype(np.int64)
        newer = np.flatnonzero(incarnation > np.array(self.incarnation, np.int64)[code])
        first: dict[tuple[int, int], int] = {}
        for i in newer[np.argsort(rank[kind][newer])]:
            first.setdefault((int(code[i]), int(incarnation[i])), int(i))
        return [
            (
                2 * int(rank[kind][i]) - 1,
                {
                    "instance": self.names[instance],
                    "incarnation": life,
                    "lifecycle": "implied",
                    "ts_us": int(rows.effective_us[i]),
                    "reports_residency": True if kind == "residency" else None,
                },
            )
            for (instance, life), i in first.items()
        ]

    def _step(self, row: dict[str, object]) -> list[tuple[int, int, int, int]]:
        """Steps (op, instance, incarnation, ts_us) that one row means, applied to this state as they are made."""
        i, life, ts_us, lifecycle = self.code(str(row["instance"])), int(row["incarnation"]), int(row["ts_us"]), row["lifecycle"]  # type: ignore[call-overload]
        if life < self.incarnation[i]:
            return []
        ops: list[int] = []
        if life > self.incarnation[i]:
            ops += [OP_DOWN] if self.incarnation[i] >= 0 and self.up[i] else []
            ops += [OP_UP]
        elif lifecycle == "up" and not self.up[i]:
            ops += [OP_UP]
        if lifecycle == "down":
            ops += [OP_DOWN]
        elif lifecycle == "cleared":
            ops += [OP_DOWN, OP_UP]
        elif lifecycle == "draining":
            ops += [OP_DRAIN]
        self.incarnation[i] = life
        for op in ops:
            self.up[i] = int(op == OP_UP)
        ops += self._source_steps(i, row)
        if row.get("capacity_blocks") is not None:
            self.capacity_blocks[i] = int(row["capacity_blocks"])  # type: ignore[call-overload]
        return [(op, i, life, ts_us) for op in ops]

    def _source_steps(self, i: int, row: dict[str, object]) -> list[int]:
        ops = []
        if (state := row.get("source_state")) is not None:
            gap = int(state in ("gap", "degraded", "silent"))
            ops += [OP_GAP if gap else OP_LIVE] if gap != self.gap[i] else []
            self.gap[i] = gap
        if (reports := row.get("reports_residency")) is not None:
            ops += [OP_REPORTS if reports else OP_MUTE] if int(bool(reports)) != self.reports[i] else []
            self.reports[i] = int(bool(reports))
        return ops


def _instance_rows(rows: Pending) -> list[dict[str, object]]:
    names = ["instance", "incarnation", "lifecycle", "capacity_blocks", "source_state", "reports_residency"]
    listed = rows.batch.select(names).to_pylist()
    return [{**row, "ts_us": int(ts)} for row, ts in zip(listed, rows.effective_us, strict=True)]
