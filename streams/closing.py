"""Working through one closed window: from its rows in application order to the rows of every table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from analytics.causes import CAUSES
from analytics.reuse.run_exact import Runs, RunStack
from ingest.events import KINDS, Kind
from streams import tables
from streams.causes import (
    CAPACITY_RESIZE,
    CAPACITY_SELF,
    FOREVER,
    INSTANCE,
    OP_ACCESS,
    OP_CLEARED,
    OP_EVICTED,
    OP_STORED,
    Accesses,
    CauseTable,
    Fleet,
    Ops,
    Segments,
)
from streams.codes import Coded, coded, group, recoded
from streams.instances import Steps
from streams.order import Pending
from streams.windows import CAUSE, REUSE, REUSE_TIME, Columns, add_causes, add_reuse, add_reuse_times

Key = tuple[str, str, int]  # tenant, model, block size


@dataclass(slots=True)
class KeyState:
    """All that a shard keeps for one key."""

    causes: CauseTable
    fleet: RunStack
    placed: dict[str, RunStack]


@dataclass(frozen=True, slots=True)
class Names:
    """Vocabularies that codes index: `instances` by bit, `tenants` by shard code."""

    instances: list[str]
    tenants: list[str]


@dataclass(frozen=True, slots=True)
class Placed:
    """A window's access and residency rows in application order with their codes. `key` indexes `keys`; `rank` is the shared order."""

    rows: Pending
    rank: NDArray[np.int64]
    keys: list[Key]
    key: NDArray[np.int64]
    instance: NDArray[np.int64]


def in_order(taken: dict[Kind, Pending], rank: dict[Kind, NDArray[np.int64]]) -> dict[Kind, NDArray[np.int64]]:
    """Put every kind's rows in application order, in place of `taken`; returns their ranks, now ascending."""
    for kind in KINDS:
        if len(rank[kind]) and (np.diff(rank[kind]) < 0).any():
            taken[kind] = taken[kind].take(np.argsort(rank[kind]))
    return {kind: np.sort(rank[kind], kind="stable") for kind in KINDS}


def placed(rows: Pending, rank: NDArray[np.int64], instance: NDArray[np.int64]) -> Placed:
    """Rows with their keys, keys in ascending order."""
    sizes = rows.batch.column("block_size").dictionary_encode()
    block_size = Coded(sizes.indices.to_numpy(zero_copy_only=False).astype(np.int64), [str(size) for size in sizes.dictionary.to_pylist()])
    key, names = group([*(coded(rows.batch.column(name)) for name in ("tenant", "model")), block_size])
    return Placed(rows, rank, [(tenant, model, int(size)) for tenant, model, size in names], key, instance)


class WindowWork:
    """Collects the rows of one window; `key` is called for each key in sorted order, then `tables` once."""

    def __init__(self, access: Placed, residency: Placed, steps: Steps, fleet: Fleet, names: Names) -> None:
        self.access, self.residency, self.steps, self.fleet, self.names = access, residency, steps, fleet, names
        self.cause, self.reuse, self.reuse_time = Columns(CAUSE), Columns(REUSE), Columns(REUSE_TIME)
        self.cause_tokens = np.zeros((len(access.rank), len(CAUSES)), np.int64)
        batch = access.rows.batch
        category, names_of = coded(batch.column("category"))
        self.categories = ["", *names_of]
        self.category = category + 1
        self.served = recoded(batch.column("outcome"), {"served": 1}) == 1
        self.end_us = _prefill_end(access.rows, self.served)
        # Requests that were not served touch no stack; their blocks count as known, since nothing says that they are not.
        self.known = np.full(len(access.rank), np.iinfo(np.int32).max, np.int64)
        self.beyond = np.zeros(len(access.rank), np.int64)
        tenants = {name: code for code, name in enumerate(names.tenants)}
        self.cause_tenant = recoded(residency.rows.batch.column("cause_tenant"), tenants)
        self.gone = _gone_cause(residency.rows.batch)
        self.op = recoded(residency.rows.batch.column("kind"), {"stored": OP_STORED, "evicted": OP_EVICTED, "cleared": OP_CLEARED})

    def key(self, key: Key, state: KeyState, depth_of: dict[str, int]) -> None:
        """Causes and reuse of one key; `depth_of` gives the stack depth in blocks per instance name, '' for the fleet."""
        mine = _rows_of(self.access, key)
        self._add_reuse(key, mine[self.served[mine]], state, depth_of)
        segments = state.causes.apply(self._ops(key, mine), self._accesses(mine), self.fleet.copy())
        self._add_causes(key, mine, segments)
        state.causes.forget(depth_of[""])

    def _accesses(self, mine: NDArray[np.int64]) -> Accesses:
        batch = self.access.rows.batch
        offsets, chain = _chains(batch, mine)
        prompt, hit = (batch.column(name).to_numpy()[mine] for name in ("prompt_tokens", "hit_tokens"))
        return Accesses(prompt, hit, self.end_us[mine], self.known[mine], self.beyond[mine], offsets, chain)

    def _ops(self, key: Key, mine: NDArray[np.int64]) -> Ops:
        theirs = _rows_of(self.residency, key)
        access, residency, steps = self.access, self.residency, self.steps
        n, r, s = len(mine), len(theirs), len(steps.rank)
        order = np.argsort(np.concatenate((2 * access.rank[mine], 2 * residency.rank[theirs], steps.rank)), kind="stable")

        def column(a: Any, b: Any, c: Any, dtype: type) -> NDArray[np.generic]:
            parts = (np.broadcast_to(value, (size,)) for value, size in ((a, n), (b, r), (c, s)))
            return np.concatenate([np.asarray(part, dtype) for part in parts])[order]

        life = residency.rows.batch.column("incarnation").to_numpy()[theirs]
        block = residency.rows.batch.column("block").to_numpy()[theirs]
        return Ops(
            op=column(OP_ACCESS, self.op[theirs], steps.op, np.uint8),  # type: ignore[arg-type]
            instance=column(access.instance[mine], residency.instance[theirs], steps.instance, np.int32),  # type: ignore[arg-type]
            incarnation=column(0, life, steps.incarnation, np.int64),  # type: ignore[arg-type]
            ts_us=column(access.rows.effective_us[mine], residency.rows.effective_us[theirs], steps.ts_us, np.int64),  # type: ignore[arg-type]
            block=column(0, block, 0, np.uint64),  # type: ignore[arg-type]
            cause=column(0, self.gone[theirs], 0, np.uint8),  # type: ignore[arg-type]
            tenant=column(-1, self.cause_tenant[theirs], -1, np.int32),  # type: ignore[arg-type]
            access=column(np.arange(n), -1, -1, np.int32),  # type: ignore[arg-type]
        )

    def _add_causes(self, key: Key, mine: NDArray[np.int64], segments: Segments) -> None:
        access = mine[segments.access]
        np.add.at(self.cause_tokens, (access, segments.cause), segments.end - segments.start)
        add_causes(
            self.cause,
            instance=self.access.instance[access],
            cause=segments.cause.astype(np.int64),
            tenant=segments.tenant.astype(np.int64),
            inferred=segments.inferred.astype(np.int64),
            access=segments.access.astype(np.int64),
            start=segments.start,
            end=segments.end,
            block_size=key[2],
            instances=self.names.instances,
            tenants=self.names.tenants,
            tenant_name=key[0],
            model=key[1],
        )

    def _add_reuse(self, key: Key, mine: NDArray[np.int64], state: KeyState, depth_of: dict[str, int]) -> None:
        tenant, model, block_size = key
        place = {"tenant": tenant, "model": model, "block_size": block_size}
        if not len(mine):
            return
        ts_us = self.access.rows.effective_us
        state.fleet.max_depth_blocks = depth_of[""]
        runs = state.fleet.touch(ts_us[mine], *_chains(self.access.rows.batch, mine))
        add_reuse(self.reuse, runs, scope="fleet", instance="", **place)
        self._add_known(mine, runs)
        instance = self.access.instance[mine]
        for bit in np.unique(instance):
            name = self.names.instances[bit]
            here = mine[instance == bit]
            stack = state.placed.setdefault(name, RunStack())
            stack.max_depth_blocks = depth_of[name]
            runs = stack.touch(ts_us[here], *_chains(self.access.rows.batch, here))
            add_reuse(self.reuse, runs, scope="placed", instance=name, **place)
            add_reuse_times(self.reuse_time, runs, self.category[here], self.categories, instance=name, **place)

    def _add_known(self, mine: NDArray[np.int64], runs: Runs) -> None:
        """Leading blocks of each chain that its tenant had touched before: all but the one cold run at its end."""
        cold = runs.distance < 0
        self.known[mine[runs.request[cold]]] = runs.position[cold]
        self.beyond[mine[runs.request[cold]]] = runs.beyond[cold]

    def tables(self, partition: int, instance_rows: Pending) -> dict[str, pa.Table | None]:
        """Rows per table, in the order in which they are to be inserted; instance rows are kept by partition 0 only."""
        return {
            "access_raw": tables.access_raw(self.access.rows, self.cause_tokens, partition),
            "instance_raw": tables.instance_raw(instance_rows, partition) if partition == 0 else None,
            "traffic_1m": tables.traffic(self.access.rows),
            "cause_1m": self.cause.table(),
            "reuse_1m": self.reuse.table(),
            "reuse_time_1m": self.reuse_time.table(),
            "residency_1m": tables.residency(self.residency.rows),
        }


def _rows_of(placed_rows: Placed, key: Key) -> NDArray[np.int64]:
    if key not in placed_rows.keys:
        return np.zeros(0, np.int64)
    return np.flatnonzero(placed_rows.key == placed_rows.keys.index(key))


def _chains(batch: pa.RecordBatch, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """(offsets int64[n+1], hashes uint64[m]) of some rows' chains, rows ascending; a view when all rows are meant."""
    chains = batch.column("chain")
    if len(rows) < batch.num_rows:
        chains = chains.take(pa.array(rows))
    offsets = chains.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0], chains.flatten().to_numpy()


def _gone_cause(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Cause that a removal leaves behind. Pressure is marked capacity_self; the kernel tells whose it was by the cause tenant."""
    reasons = {"pressure": CAPACITY_SELF, "resize": CAPACITY_RESIZE}
    codes = recoded(batch.column("reason"), reasons)
    removed = recoded(batch.column("reason"), dict.fromkeys(("restart", "clear", "drain", "removal"), INSTANCE))
    # An eviction without a reason is what engines send when an allocation took the block.
    return np.where(codes >= 0, codes, np.where(removed >= 0, removed, CAPACITY_SELF))


def _prefill_end(rows: Pending, served: NDArray[np.bool_]) -> NDArray[np.int64]:
    """When each request's prefill ends: unknown is for ever, a request that was not served has ended."""
    prefill_us = tables.microseconds(rows.batch.column("prefill_ms"))
    end = rows.effective_us + pc.fill_null(prefill_us, 0).to_numpy(zero_copy_only=False)
    end = np.where(np.asarray(pc.is_valid(prefill_us)), end, FOREVER)
    return np.where(served, end, rows.effective_us)
