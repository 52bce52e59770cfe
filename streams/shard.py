"""The shard: one partition's deterministic state machine, from packed events to window rows.

Rows wait in event-time order; when the watermark passes a window's end, the whole window is worked through at once, vectorised:
lifecycles, then causes and reuse distances per (tenant, model, block size). Nothing here reads a clock or does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from analytics.reuse.run_exact import RunStack
from ingest.errors import KvtideError
from ingest.events import Kind
from streams.causes import CauseTable
from streams.closing import Key, KeyState, Names, WindowWork, in_order, placed
from streams.codes import coded
from streams.instances import Instances, Steps
from streams.order import NEVER, ReorderBuffer, application_order
from streams.state import pack, unpack
from streams.windows import Rows

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """`grace_us`: how long rows may come out of order. `window_us`: window length. Stacks are cut at `depth_factor` times the capacity
    they stand for (the fleet's, or one instance's) but never above `min_depth_blocks`, where memory is no matter; at
    `default_depth_blocks` while no capacity is known."""

    grace_us: int = 5_000_000
    window_us: int = 60_000_000
    depth_factor: int = 16
    min_depth_blocks: int = 1 << 16
    default_depth_blocks: int = 1 << 24


class Shard:
    """State machine of one partition. `apply` takes a decoded record and returns the rows of the windows it closed."""

    def __init__(self, partition: int, config: ShardConfig | None = None) -> None:
        self.partition, self.config = partition, config or ShardConfig()
        self.buffer = ReorderBuffer(self.config.grace_us)
        self.instances = Instances()
        self.tenants: list[str] = []
        self.keys: dict[Key, KeyState] = {}

    def apply(self, kind: Kind, batch: pa.RecordBatch, offset: int) -> list[Rows]:
        """Add one record's rows; returns the rows of every window that this closed, oldest window first.

        Cost: O(rows) to buffer; a closed window costs O(runs + missed blocks + residency rows).
        """
        self.buffer.add(kind, batch, offset)
        closed: list[Rows] = []
        while (start_us := self._closable()) is not None:
            closed += self._close(start_us)
        return closed

    @property
    def late_rows(self) -> int:
        """Rows that came after the watermark had passed them, ever."""
        return self.buffer.late_rows

    def snapshot(self) -> bytes:
        """The whole state as bytes; `restore` gives an equal shard."""
        keys = [
            {
                "key": list(key),
                "causes": state.causes.state(),
                "fleet": state.fleet.state(),
                "placed": {name: stack.state() for name, stack in state.placed.items()},
            }
            for key, state in self.keys.items()
        ]
        return pack(
            {
                "version": STATE_VERSION,
                "buffer": self.buffer.state(),
                "instances": self.instances.state(),
                "tenants": self.tenants,
                "keys": keys,
            }
        )

    @classmethod
    def restore(cls, partition: int, config: ShardConfig | None, data: bytes) -> Shard:
        """Shard from a snapshot. Raises `KvtideError` for a snapshot of another state version."""
        state = unpack(data)
        if state["version"] != STATE_VERSION:
            raise KvtideError(
                f"the checkpoint of partition {partition} has state version {state['version']}, this worker reads {STATE_VERSION}; "
                "work the topic from its start into a fresh store, or run the kvtide version that wrote it"
            )
        shard = cls(partition, config)
        shard.buffer = ReorderBuffer.from_state(shard.config.grace_us, state["buffer"])
        shard.instances = Instances.from_state(state["instances"])
        shard.tenants = list(state["tenants"])
        for entry in state["keys"]:
            tenant, model, block_size = entry["key"]
            causes = CauseTable.from_state(shard._tenant_code(tenant), block_size, entry["causes"])
            stacks = {name: RunStack.from_state(stack) for name, stack in entry["placed"].items()}
            shard.keys[tenant, model, block_size] = KeyState(causes, RunStack.from_state(entry["fleet"]), stacks)
        return shard

    def _closable(self) -> int | None:
        """Start of the oldest pending window, if the watermark has passed its end."""
        mark, width = self.buffer.watermark_us, self.config.window_us
        if mark == NEVER or (earliest := self.buffer.earliest_us) is None:
            return None
        start_us = earliest // width * width
        return start_us if start_us + width <= mark else None

    def _close(self, start_us: int) -> list[Rows]:
        taken = self.buffer.take(start_us + self.config.window_us)
        rank = in_order(taken, application_order(taken))
        instance = {kind: self.instances.codes(rows.batch.column("instance")) for kind, rows in taken.items()}
        fleet = self.instances.fleet()
        depth_of = self._depths()
        steps = self.instances.advance(taken, rank)
        access, residency = (placed(taken[kind], rank[kind], instance[kind]) for kind in ("access", "residency"))
        for name in sorted(coded(taken["residency"].batch.column("cause_tenant")).names):
            self._tenant_code(name)
        keys = self._keys_to_work(access.keys + residency.keys, steps)
        work = WindowWork(access, residency, steps, fleet, Names(self.instances.names, self.tenants))
        for key in keys:
            work.key(key, self.keys[key], depth_of)
        return self._stamped(work.tables(self.partition, taken["instance"]), start_us)

    def _keys_to_work(self, seen: list[Key], steps: Steps) -> list[Key]:
        """Keys with rows in the window, and all others too when an instance lost its contents."""
        for key in sorted(set(seen) - set(self.keys)):
            self.keys[key] = KeyState(CauseTable(self._tenant_code(key[0]), key[2]), RunStack(), {})
        return sorted(self.keys if steps.any_down else set(seen))

    def _depths(self) -> dict[str, int]:
        """Stack depth in blocks per instance, '' for the fleet, from the capacities as the window began."""
        capacity = dict(zip(self.instances.names, self.instances.capacity_blocks, strict=True))
        capacity[""] = sum(capacity.values())
        depth, floor = self.config.depth_factor, self.config.min_depth_blocks
        return {name: max(depth * blocks, floor) if blocks else self.config.default_depth_blocks for name, blocks in capacity.items()}

    def _tenant_code(self, name: str) -> int:
        if name not in self.tenants:
            self.tenants.append(name)
        return self.tenants.index(name)

    def _stamped(self, tables: dict[str, pa.Table | None], start_us: int) -> list[Rows]:
        start_s = start_us // 1_000_000
        rows = []
        for table, data in tables.items():
            if data is None or not data.num_rows:
                continue
            if table.endswith("_1m"):
                stamp = pa.array(np.full(data.num_rows, start_s)).cast(pa.timestamp("s", tz="UTC"))
                data = data.add_column(0, "window_start", stamp)
            rows.append(Rows(table, str(start_s), data))
        return rows
