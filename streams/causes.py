"""Causes: why each prompt token was not served from local KV, from residency events alone (docs/design.md section 5).

One `CauseTable` belongs to one (tenant, model, block_size). It knows, per block, on which instances a copy is resident, how the last
copy went, and whether somebody asked for it since. Only missed blocks and residency rows cost a probe; hits cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from analytics.causes import CAUSES
from streams import blocks
from streams.blocks import (
    ASKED,
    BLOOM_BITS,
    HOLD,
    KEY,
    SEEN,
    STATE,
    claim,
    filter_has,
    find,
    holds,
    is_held,
    lose,
    lose_all,
    state_of,
    warm,
)

(HIT, GRANULARITY, UNOBSERVED, ROUTING, BROKEN_PREFIX, IN_FLIGHT, NOT_STORED, INSTANCE, CAPACITY_SELF, CAPACITY_OTHER,
 CAPACITY_RESIZE, COLD, BEYOND) = range(len(CAUSES))  # fmt: skip

# Operations of the one sequence that a table applies.
OP_ACCESS, OP_STORED, OP_EVICTED, OP_CLEARED, OP_UP, OP_DOWN, OP_DRAIN, OP_GAP, OP_LIVE, OP_REPORTS, OP_MUTE = range(11)

FOREVER = np.int64(1 << 62)


class Fleet(NamedTuple):
    """Per instance bit: `up`, `gap`, `reports` (residency) as uint8[n]; `incarnation` int64[n]. `scratch` int64[1] is nobody's."""

    up: NDArray[np.uint8]
    gap: NDArray[np.uint8]
    reports: NDArray[np.uint8]
    incarnation: NDArray[np.int64]
    scratch: NDArray[np.int64]

    def copy(self) -> Fleet:
        return Fleet(*(column.copy() for column in self))  # type: ignore[arg-type]


class Ops(NamedTuple):
    """The sequence. `op` uint8, `instance` int32, `incarnation` int64, `ts_us` int64, `block` uint64, `cause` uint8 (why a copy goes),
    `tenant` int32 (whose allocation forced it, -1 unknown), `access` int32 (row of the access columns, -1)."""

    op: NDArray[np.uint8]
    instance: NDArray[np.int32]
    incarnation: NDArray[np.int64]
    ts_us: NDArray[np.int64]
    block: NDArray[np.uint64]
    cause: NDArray[np.uint8]
    tenant: NDArray[np.int32]
    access: NDArray[np.int32]


class Accesses(NamedTuple):
    """Columns of the accesses that `Ops.access` points to. `end_us` is when the request's prefill ends (FOREVER when unknown).

    `known_blocks` is how many leading blocks of the chain the tenant had asked for before, `beyond_blocks` how many after those may have
    been: all that an instance without residency lets one say.
    """

    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    end_us: NDArray[np.int64]
    known_blocks: NDArray[np.int64]
    beyond_blocks: NDArray[np.int64]
    offsets: NDArray[np.int64]
    chain: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Segments:
    """Stretches of prompt tokens [start, end) of one access with one cause: together they cover every prompt token once."""

    access: NDArray[np.int32]
    cause: NDArray[np.uint8]
    tenant: NDArray[np.int32]
    inferred: NDArray[np.uint8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


class CauseTable:
    """Residency and history of one (tenant, model, block_size)'s blocks over all instances.

    `tenant` is this tenant's code, so that evictions by itself are told from evictions by others. `max_blocks` bounds the memory:
    `forget` drops the longest gone blocks into a Bloom filter, after which they read as `beyond` instead of `cold`.
    """

    def __init__(self, tenant: int, block_size: int, words: int = 1, capacity: int = 1024) -> None:
        self.tenant, self.block_size = tenant, block_size
        self.rows = blocks.new_rows(capacity, words)
        self.count = 0
        self.bloom = np.zeros(0, np.uint64)

    def apply(self, ops: Ops, accesses: Accesses, fleet: Fleet) -> Segments:
        """Apply a sequence in order; `fleet` (changed in place) is the state of the instances at its start.

        Cost: O(ops + missed blocks) probes; O(table) for each instance that goes down or is cleared.
        """
        missed = int(np.maximum(np.diff(accesses.offsets) - accesses.hit_tokens // self.block_size, 0).sum())
        self._reserve(missed + int(np.count_nonzero(ops.op == OP_STORED)), len(fleet.up))
        out = tuple(
            np.empty(missed + 4 * len(accesses.prompt_tokens), t) for t in (np.int32, np.uint8, np.int32, np.uint8, np.int64, np.int64)
        )
        n, self.count = _apply(self.rows, self.count, self.bloom, fleet, ops, accesses, self.tenant, self.block_size, out)
        return Segments(*(column[:n].copy() for column in out))  # type: ignore[arg-type]

    def forget(self, max_blocks: int) -> int:
        """Drop the longest gone blocks so that about `max_blocks` stay; resident ones always do. Returns how many went."""
        if self.count <= max_blocks + max_blocks // 4:
            return 0
        used = self.rows[:, STATE] != 0
        gone = used & ~self.rows[:, HOLD:].any(axis=1)
        n_drop = min(self.count - max_blocks, int(gone.sum()))
        if n_drop <= 0:
            return 0
        ages = np.sort(self.rows[gone, SEEN], kind="stable")
        drop = gone & (self.rows[:, SEEN] <= ages[n_drop - 1])
        if not len(self.bloom):
            self.bloom = np.zeros(BLOOM_BITS // 64, np.uint64)
        blocks.filter_add(self.bloom, self.rows[drop, KEY].view(np.uint64))
        self._rebuild(used & ~drop, len(self.rows), self.rows.shape[1] - HOLD)
        return int(drop.sum())

    def state(self) -> dict[str, NDArray[np.generic]]:
        """Live rows and the filter, for a checkpoint; `from_state` restores an equal table."""
        live = self.rows[self.rows[:, STATE] != 0]
        return {"rows": live[np.argsort(live[:, KEY], kind="stable")], "bloom": self.bloom}

    @classmethod
    def from_state(cls, tenant: int, block_size: int, state: dict[str, NDArray[np.generic]]) -> CauseTable:
        table = cls(tenant, block_size)
        table.rows = np.ascontiguousarray(state["rows"], dtype=np.int64)
        table.bloom = np.ascontiguousarray(state["bloom"], dtype=np.uint64)
        table._rebuild(np.ones(len(table.rows), np.bool_), max(1024, 2 * len(table.rows)), table.rows.shape[1] - HOLD)
        return table

    def _reserve(self, more: int, instances: int) -> None:
        words = max(self.rows.shape[1] - HOLD, -(-instances // 64))
        need = (self.count + more) * 3 // 2
        if need > len(self.rows) or words > self.rows.shape[1] - HOLD:
            self._rebuild(self.rows[:, STATE] != 0, max(len(self.rows), need), words)

    def _rebuild(self, keep: NDArray[np.bool_], capacity: int, words: int) -> None:
        fresh = blocks.new_rows(1 << max(10, int(capacity - 1).bit_length()), words)
        self.count = blocks.copy_into(fresh, self.rows, keep.view(np.uint8))
        self.rows = fresh


@njit(cache=True, nogil=True)
def _emit(out, n, access, cause, tenant, inferred, start, end):  # type: ignore[no-untyped-def]
    """Append a segment, or lengthen the last one if it goes on."""
    if end <= start:
        return n
    if n and out[0][n - 1] == access and out[1][n - 1] == cause and out[2][n - 1] == tenant and out[5][n - 1] == start:
        out[5][n - 1] = end
        return n
    out[0][n] = access
    out[1][n] = cause
    out[2][n] = tenant
    out[3][n] = inferred
    out[4][n] = start
    out[5][n] = end
    return n + 1


@njit(cache=True, nogil=True)
def _longest_elsewhere(rows, fleet, instance, chain, begin, end, hit_blocks):  # type: ignore[no-untyped-def]
    """Length in blocks of the longest leading run of chain[begin:end] held by another up instance, if beyond `hit_blocks`."""
    candidates = np.zeros(rows.shape[1] - HOLD, np.int64)
    for i in range(len(fleet.up)):
        if fleet.up[i] and i != instance:
            candidates[i >> 6] |= np.int64(1) << (i & 63)
    # Most misses are held nowhere else: look at the first missed block before walking the hit part.
    if not _narrow(rows, candidates, chain[begin + hit_blocks]):
        return 0
    for k in range(begin, begin + hit_blocks):
        if not _narrow(rows, candidates, chain[k]):
            return 0
    run = hit_blocks + 1
    while begin + run < end and _narrow(rows, candidates, chain[begin + run]):
        run += 1
    return run


@njit(cache=True, nogil=True)
def _narrow(rows, candidates, key):  # type: ignore[no-untyped-def]
    """Keep the candidates that hold `key`; False (and an unchanged set) when none does."""
    slot = find(rows, key)
    left = np.int64(0)
    for w in range(len(candidates)):
        left |= candidates[w] & rows[slot, HOLD + w]
    if left == 0:
        return False
    for w in range(len(candidates)):
        candidates[w] &= rows[slot, HOLD + w]
    return True


@njit(cache=True, nogil=True)
def _cause_of(rows, bloom, fleet, instance, key, ts_us, own):  # type: ignore[no-untyped-def]
    """(cause, cause tenant) of one missed block that no other instance could have served in a leading run."""
    slot = find(rows, key)
    known = rows[slot, STATE] != 0
    if fleet.gap[instance]:
        return UNOBSERVED, -1
    if not known:
        return (BEYOND if filter_has(bloom, key) else COLD), -1
    held = is_held(rows, slot)
    if held:
        for i in range(len(fleet.up)):
            if fleet.up[i] and holds(rows, slot, i):
                return BROKEN_PREFIX, -1
    if rows[slot, ASKED] >= 0:
        return (IN_FLIGHT if ts_us < rows[slot, ASKED] else NOT_STORED), -1
    if held:
        return INSTANCE, -1
    cause, tenant = (rows[slot, STATE] & 255) - 1, (rows[slot, STATE] >> 8) - 1
    if cause == CAPACITY_SELF and tenant != own:
        return CAPACITY_OTHER, tenant
    return cause, -1


@njit(cache=True, nogil=True)
def _attribute(rows, count, bloom, fleet, accesses, row, instance, ts_us, own, block_size, out, n):  # type: ignore[no-untyped-def]
    """Cover one access's prompt with segments; where stores are reported, mark its missed blocks as asked for."""
    begin, end = accesses.offsets[row], accesses.offsets[row + 1]
    prompt, hit = accesses.prompt_tokens[row], accesses.hit_tokens[row]
    usable = max((prompt - 1) // block_size * block_size, hit)
    n = _emit(out, n, row, HIT, -1, 0, np.int64(0), hit)
    first = hit // block_size
    named = min(end - begin, -(-usable // block_size))
    elsewhere = np.int64(0)
    if first < named and not fleet.gap[instance]:
        elsewhere = _longest_elsewhere(rows, fleet, instance, accesses.chain, begin, begin + named, first)
    if fleet.reports[instance]:
        fleet.scratch[0] = warm(rows, accesses.chain, begin + first, end)
        for k in range(first, named):
            start, stop = max(hit, k * block_size), min(usable, (k + 1) * block_size)
            cause, tenant = ROUTING, np.int64(-1)
            if k >= elsewhere:
                cause, tenant = _cause_of(rows, bloom, fleet, instance, accesses.chain[begin + k], ts_us, own)
            n = _emit(out, n, row, cause, tenant, 0, start, stop)
        count = _ask(rows, count, accesses, row, begin + first, end, instance, ts_us)
    else:
        n = _infer(accesses, row, first, named, elsewhere, fleet.gap[instance], hit, usable, block_size, out, n)
    # Blocks that the record does not name (a chain shorter than the prompt) cannot be explained.
    n = _emit(out, n, row, UNOBSERVED, -1, 0, max(hit, min(usable, named * block_size)), usable)
    n = _emit(out, n, row, GRANULARITY, -1, 0, usable, prompt)
    return n, count


@njit(cache=True, nogil=True)
def _infer(accesses, row, first, named, elsewhere, gap, hit, usable, block_size, out, n):  # type: ignore[no-untyped-def]
    """Segments of the missed blocks [first, named) on an instance that sends no residency: what the tenant's own history allows to say."""
    known = named if gap else min(named, accesses.known_blocks[row])
    beyond = min(named, known + accesses.beyond_blocks[row])
    at = np.int64(first)
    for cause, upto in ((ROUTING, min(elsewhere, named)), (UNOBSERVED, known), (BEYOND, beyond), (COLD, named)):
        if upto > at:
            n = _emit(out, n, row, cause, -1, 1, max(hit, at * block_size), min(usable, upto * block_size))
            at = np.int64(upto)
    return n


@njit(cache=True, nogil=True)
def _ask(rows, count, accesses, row, begin, end, instance, ts_us):  # type: ignore[no-untyped-def]
    """Mark the missed blocks chain[begin:end] as asked for until the request's prefill ends; returns the number of known blocks."""
    never = state_of(COLD, -1)
    for k in range(begin, end):
        slot = find(rows, accesses.chain[k])
        count += claim(rows, slot, accesses.chain[k], never)
        rows[slot, SEEN] = ts_us
        # A copy that stands here but could not be reached gets a twin, and a twin's store is no event: nothing to wait for.
        if not holds(rows, slot, instance):
            rows[slot, ASKED] = max(rows[slot, ASKED], accesses.end_us[row])
    return count


@njit(cache=True, nogil=True)
def _store(rows, count, key, instance, ts_us):  # type: ignore[no-untyped-def]
    slot = find(rows, key)
    count += claim(rows, slot, key, state_of(COLD, -1))
    rows[slot, HOLD + (instance >> 6)] |= np.int64(1) << (instance & 63)
    rows[slot, ASKED], rows[slot, SEEN] = -1, ts_us
    return count


@njit(cache=True, nogil=True)
def _apply(rows, count, bloom, fleet, ops, accesses, own, block_size, out):  # type: ignore[no-untyped-def]
    n = 0
    for i in range(len(ops.op)):
        op, instance, ts_us = ops.op[i], np.int64(ops.instance[i]), ops.ts_us[i]
        if op == OP_ACCESS:
            n, count = _attribute(rows, count, bloom, fleet, accesses, ops.access[i], instance, ts_us, own, block_size, out, n)
        elif op in (OP_STORED, OP_EVICTED, OP_CLEARED):
            # Rows of an earlier life of the instance speak of KV that is gone already.
            if ops.incarnation[i] < fleet.incarnation[instance]:
                continue
            went = state_of(np.int64(ops.cause[i]), np.int64(ops.tenant[i]))
            if op == OP_STORED:
                count = _store(rows, count, ops.block[i], instance, ts_us)
            elif op == OP_CLEARED:
                lose_all(rows, instance, went, ts_us)
            else:
                slot = find(rows, ops.block[i])
                if rows[slot, STATE] != 0:
                    lose(rows, slot, instance, went, ts_us)
        elif op == OP_UP:
            fleet.up[instance] = 1
            fleet.incarnation[instance] = ops.incarnation[i]
        elif op == OP_DOWN:
            fleet.up[instance] = 0
            lose_all(rows, instance, state_of(INSTANCE, -1), ts_us)
        elif op == OP_DRAIN:
            fleet.up[instance] = 0
        elif op == OP_GAP:
            fleet.gap[instance] = 1
        elif op == OP_LIVE:
            fleet.gap[instance] = 0
        elif op == OP_REPORTS:
            fleet.reports[instance] = 1
        elif op == OP_MUTE:
            fleet.reports[instance] = 0
    return n, count
