"""Exact stack distances where blocks differ in size: a cache of `capacity` hits iff what lies above a block and the block itself fit.

Olken's tree with the size of a block in place of 1. Source: Olken 1993; the inclusive rule (distance + own size <= capacity) is that of an
LRU which evicts from its bottom until the newcomer fits, checked against one.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.points import Sample, block_sizes
from analytics.reuse.chains import ChainColumns, densify

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


def weighted(chains: ChainColumns, *, sizes: I64 | None = None, unit: int | None = None) -> Curve:
    """Exact curve of an LRU whose capacity is counted in sizes: `capacity` means `capacity * unit`.

    `sizes` int64[m] of every block reference, above 0 (its tokens by default), `unit` what a capacity of 1 holds (`block_size` by
    default; 1 for capacities in bytes). Where every block fills `unit` this is `olken`. A block whose size changes counts at its old size
    until touched.
    Cost: three walks of a tree of int64 a block, O(m log distinct).
    """
    own = block_sizes(chains) if sizes is None else np.ascontiguousarray(sizes, np.int64)
    ids, distinct = densify(chains.hashes)
    distances = weighted_distances(chains.offsets, ids, distinct, own)
    # Integers: D + own <= c * unit is the same as (D + own - 1) / unit < c, the curve's own rule.
    scaled = np.where(distances < 0, -1.0, (distances + own - 1) / (unit or chains.block_size))
    return Sample(np.arange(own.size), scaled, np.ones(own.size)).curve(chains, adj=False)


def weighted_distances(offsets: I64, ids: I32, n_ids: int, sizes: I64) -> I64:
    """Size of all blocks touched since the last touch of each block reference, itself left out; int64[m], -1 for a first touch.

    `offsets` int64[n+1] into `ids` int32[m], dense in [0, n_ids), and `sizes` int64[m]. Looked up as a whole and touched leaf first.
    Cost: O(m log n_ids); memory O(n_ids + m).
    """
    longest = int(np.max(np.diff(offsets), initial=0))
    distances = np.empty(ids.size, np.int64)
    _weigh(offsets, ids, n_ids, 2 * n_ids + longest + 1, sizes, distances)
    return distances


@nb.njit(cache=True, nogil=True)
def _add(tree: I64, slot: int, delta: int) -> None:
    while slot < tree.size:
        tree[slot] += delta
        slot += slot & -slot


@nb.njit(cache=True, nogil=True)
def _prefix(tree: I64, slot: int) -> int:
    total = 0
    while slot > 0:
        total += tree[slot]
        slot -= slot & -slot
    return total


@nb.njit(cache=True, nogil=True)
def _renumber(tree: I64, last: I32, owner: I32, held: I64, top: int) -> int:
    live = 0
    tree[:] = 0
    for slot in range(1, top + 1):
        key = owner[slot]
        if key >= 0 and last[key] == slot:
            live += 1
            owner[live], last[key], tree[live] = key, live, held[key]
    for slot in range(1, tree.size):
        parent = slot + (slot & -slot)
        if parent < tree.size:
            tree[parent] += tree[slot]
    return live


@nb.njit(cache=True, nogil=True)
def _weigh(offsets: I64, ids: I32, n_ids: int, slots: int, sizes: I64, distances: I64) -> None:
    tree, owner = np.zeros(slots, np.int64), np.full(slots, -1, np.int32)
    last, held = np.zeros(n_ids, np.int32), np.zeros(n_ids, np.int64)
    top = total = 0
    for request in range(offsets.size - 1):
        lo, hi = offsets[request], offsets[request + 1]
        for i in range(lo, hi):
            slot = last[ids[i]]
            distances[i] = total - _prefix(tree, slot) if slot > 0 else -1
        if top + hi - lo >= slots:
            top = _renumber(tree, last, owner, held, top)
        for i in range(hi - 1, lo - 1, -1):
            key, top = ids[i], top + 1
            if last[key] > 0:
                _add(tree, last[key], -held[key])
            total += sizes[i] - held[key]
            _add(tree, top, sizes[i])
            last[key], owner[top], held[key] = top, key, sizes[i]
