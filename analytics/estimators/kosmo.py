"""Kosmo: the curves of FIFO, LFU and 2Q at all sizes from one state, in place of one small cache a size.

Every sampled block has a list of evictions: at which size, and whether it came back since. An eviction at size S counts for all sizes up
to S (inclusion, which these policies break at some accesses), so the list's sizes fall strictly, and what a cache of any size holds can
be read from it. Source: Shakiba et al., Kosmo, FAST 2024, from its published description; order and ties within an access are ours.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.minisim import controlled, hits_at, sample, through
from analytics.estimators.points import Sample
from analytics.policies.queues import kernel
from analytics.reuse.chains import ChainColumns, densify

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

KOSMO_POLICIES = ("fifo", "lfu", "2q")
FIFO, LFU, TWO_Q = range(3)
# Sizes reconstructed at each access. Published: 10. More of them bring LFU nearer, but FIFO and 2Q nearer to what inclusion gets wrong.
SIZES_AN_ACCESS = (10, 40, 10)
_MOST_RECORDS = 80
_POINTS = 400

# Columns of a record; BACK_AT is 0 until the block is touched again. GHOST: evicted from 2Q's FIFO. HOT: came back into 2Q's LRU.
SIZE, COUNT, GONE_AT, BACK_AT, GHOST, HOT, RECORD_FIELDS = range(7)


class Table(NamedTuple):
    """Sampled blocks: touches, first and last access (from 1), number of records, and records int32[n, most, RECORD_FIELDS]."""

    touches: I32
    first: I32
    last: I32
    held: I32
    records: I32


def kosmo(chains: ChainColumns, *, policy: str = "lfu", s_max: int = 2048, control: bool = True, seed: int = 0) -> Curve:
    """Curve of FIFO, LFU or 2Q (`policy`) over the chains' blocks in forward order, from one pass over a sample of them.

    About `s_max` distinct blocks are sampled, evenly as in `minisim`, all where there are no more; `control` as there. The curve is a model
    even without sampling, since these policies break inclusion. Mean error there on Zipf streams: LFU 0.002 to 0.004, 2Q 0.015 to 0.03,
    FIFO 0.07 to 0.09, FIFO always too low (a block that a large cache evicts is taken from a small one which just got it back). On the
    Mooncake traces from 2,048 blocks: LFU 0.003, 2Q 0.011 and 0.033, FIFO 0.017 and 0.080. Use `minisim` unless memory for small caches is
    what lacks, and never this for FIFO.
    Raises `ValueError` for another policy or `s_max` below 1. Cost: 10 scans of the sampled distinct blocks an access, 40 for LFU.
    """
    if policy not in KOSMO_POLICIES:
        raise ValueError(f"policy {policy!r} has no Kosmo state; choose one of {', '.join(KOSMO_POLICIES)}, or use minisim")
    if s_max < 1:
        raise ValueError(f"s_max {s_max} is too small; at least one block must be tracked")
    rate = min(1.0, s_max / max(densify(chains.hashes)[1], 1))
    blocks, tracked = sample(chains, rate, seed, spread=True)
    ids, distinct = densify(chains.hashes[blocks])
    sizes = least_sizes(ids, distinct, KOSMO_POLICIES.index(policy))
    curve = Sample(blocks, np.where(sizes > 0, (sizes - 1) / tracked, -1.0), np.full(blocks.size, 1 / tracked)).curve(chains, True)
    if not control or rate == 1 or not distinct:
        return curve
    grid = np.unique(np.geomspace(1 / tracked, distinct / tracked, _POINTS).round().astype(np.int64))
    return through(chains, grid, controlled(chains, grid, hits_at(curve, grid), blocks, tracked))


def least_sizes(ids: I32, n_ids: int, policy: int) -> I64:
    """Least cache size at which each access hits, int64[n], 0 for a first touch; `policy` indexes KOSMO_POLICIES."""
    touches, first, last, held = np.zeros((4, n_ids), np.int32)
    table = Table(touches, first, last, held, np.zeros((n_ids, _MOST_RECORDS, RECORD_FIELDS), np.int32))
    sizes = np.zeros(ids.size, np.int64)
    steps = SIZES_AN_ACCESS[policy]
    _pass(table, ids, policy, sizes, np.zeros((steps, n_ids), np.int32), np.zeros(steps, np.int64), np.zeros(n_ids, np.int32))
    return sizes


@kernel
def _pass(table: Table, ids: I32, policy: int, sizes: I64, victims: I32, found: I64, marks: I32) -> None:
    seen = 0
    for i in range(ids.size):
        key, now = ids[i], i + 1
        if table.touches[key] == 0:
            seen += 1
            table.first[key], top = now, seen - 1
        else:
            top = _missing_up_to(table, key)
            sizes[i] = top + 1
            if top > 0:
                _come_back(table, key, now, top, policy, seen, found.size)
        table.touches[key] += 1
        table.last[key] = now
        for step in range(found.size):
            found[step] = _choose(table, key, _size(top, step, found.size), policy, seen, victims[step], marks)
        for step in range(found.size - 1, -1, -1):
            for j in range(found[step]):
                _evict(table, victims[step, j], now, _size(top, step, found.size), policy)


@kernel
def _choose(table: Table, newest: int, size: int, policy: int, seen: int, victims: I32, marks: I32) -> int:
    """Fill `victims` with what the cache of this size evicts for the block just inserted, as `_victim` gives it; how many.

    `marks` int32[n] is all zero before and after.
    """
    found = 0
    victim = _victim(table, newest, size, policy, seen, marks)
    while victim != 0:
        victims[found] = victim
        marks[abs(victim) - 1] = 1
        found += 1
        victim = _victim(table, newest, size, policy, seen, marks)
    for j in range(found):
        marks[abs(victims[j]) - 1] = 0
    return found


@kernel
def _size(top: int, step: int, steps: int) -> int:
    return (top * (step + 1) + steps - 1) // steps


@kernel
def _missing_up_to(table: Table, key: int) -> int:
    """Greatest size at which a block does not stand in the cache; 0 where it stands in all."""
    held = table.held[key]
    if held > 0 and table.records[key, held - 1, BACK_AT] == 0:
        return table.records[key, held - 1, SIZE]
    return 0


@kernel
def _record(table: Table, key: int, size: int) -> int:
    """Index of the record that holds for a size: the newest of at least that size, -1 for none."""
    at = table.held[key] - 1
    while at >= 0 and table.records[key, at, SIZE] < size:
        at -= 1
    return at


@kernel
def _push(table: Table, key: int, size: int) -> int:
    """A new record for sizes up to `size`, in place of those that it covers; the smallest gives way where the list is full."""
    at = table.held[key]
    while at > 0 and table.records[key, at - 1, SIZE] <= size:
        at -= 1
    at = min(at, _MOST_RECORDS - 1)
    table.held[key] = at + 1
    table.records[key, at, SIZE] = size
    return at


@kernel
def _come_back(table: Table, key: int, now: int, top: int, policy: int, seen: int, steps: int) -> None:
    """Insert a block again at all sizes at which it was missing; 2Q decides size by size whether into its LRU."""
    at = table.held[key] - 1
    gone_at, ghost, count = table.records[key, at, GONE_AT], table.records[key, at, GHOST], table.records[key, at, COUNT]
    if policy != TWO_Q or ghost == 0:
        table.records[key, at, BACK_AT] = now
        return
    for step in range(steps - 1, -1, -1):
        size = _size(top, step, steps)
        at = _push(table, key, size)
        record = table.records[key, at]
        record[GONE_AT], record[COUNT], record[GHOST] = gone_at, count, ghost
        record[HOT] = _younger_ghosts(table, size, gone_at, seen) < size // 2
        record[BACK_AT] = now


@kernel
def _younger_ghosts(table: Table, size: int, gone_at: int, seen: int) -> int:
    """Blocks that left 2Q's FIFO of a cache of this size after `gone_at` and did not come back."""
    found = 0
    for key in range(seen):
        at = _record(table, key, size)
        if at >= 0 and table.records[key, at, BACK_AT] == 0 and table.records[key, at, GHOST] == 1:
            found += table.records[key, at, GONE_AT] > gone_at
    return found


@kernel
def _victim(table: Table, newest: int, size: int, policy: int, seen: int, marks: I32) -> int:
    """What the cache of this size evicts next but for what is marked: x + 1, or -1 - x if from 2Q's FIFO, 0 where all fits."""
    resident = in_fifo = best = tie = oldest = 0
    victim = fifo_victim = -1
    for key in range(seen):
        at = _record(table, key, size)
        if marks[key] > 0 or (at >= 0 and table.records[key, at, BACK_AT] == 0):
            continue
        resident += 1
        inserted = table.records[key, at, BACK_AT] if at >= 0 else table.first[key]
        cold = policy == TWO_Q and (at < 0 or table.records[key, at, HOT] == 0)
        in_fifo += cold
        if key == newest:
            continue
        if cold:
            if fifo_victim < 0 or inserted < oldest:
                fifo_victim, oldest = key, inserted
            continue
        rank = inserted
        if policy == TWO_Q:
            rank = table.last[key]
        elif policy == LFU:
            rank = table.touches[key] - (table.records[key, at, COUNT] if at >= 0 else 0)
        if victim < 0 or rank < best or (rank == best and table.last[key] < tie):
            victim, best, tie = key, rank, table.last[key]
    if size == 0 or resident <= size:
        return 0
    if fifo_victim >= 0 and (in_fifo > max(1, size // 4) or victim < 0):
        return -1 - fifo_victim
    return victim + 1


@kernel
def _evict(table: Table, victim: int, now: int, size: int, policy: int) -> None:
    """Take a block out of the caches up to this size, unless a larger one's eviction already did."""
    key = abs(victim) - 1
    before = _record(table, key, size)
    if before >= 0 and table.records[key, before, BACK_AT] == 0:
        return
    newest = table.held[key] - 1
    back_at = table.records[key, newest, BACK_AT] if newest >= 0 else table.first[key]
    at = _push(table, key, size)
    record = table.records[key, at]
    if policy == TWO_Q and at > 0:  # the next larger sizes take over the younger state: nearer to the truth for 2Q, not for FIFO
        table.records[key, at - 1, BACK_AT] = back_at
    elif policy == TWO_Q:
        table.first[key] = back_at
    record[COUNT], record[GONE_AT], record[BACK_AT] = table.touches[key], now, 0
    record[GHOST], record[HOT] = victim < 0, 0
