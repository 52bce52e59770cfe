"""SHARDS at a fixed size: at most `s_max` blocks are tracked, the rate falling as new ones come.

Source: Waldspurger et al., SHARDS, FAST 2015, section 3.2.
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.exact import parts
from analytics.estimators.points import Sample
from analytics.estimators.sampling import Fold, P, folding, left_out, mixed, salt_of, value_of
from analytics.estimators.tracked import LIVE, Tracked, above, drop, empty, find, hash_value, insert, touch
from analytics.reuse.chains import ChainColumns

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


def shards_fixed(chains: ChainColumns, *, s_max: int = 8192, adj: bool = True, seed: int = 0, fold: Fold | None = None) -> Curve:
    """Curve from at most `s_max` tracked blocks, equal to exact while no more are distinct.

    Every reference counts 1/rate at sampled distance / rate, with the rate of its moment. A burst of new blocks lowers the rate for good.
    `adj` as in `shards`. Raises `ValueError` for `s_max` below 1.
    Cost: one hash a block, O(log s_max) a sampled one; tracking takes O(s_max) memory (the sampled references themselves are kept too).
    """
    index, count, share = folding(fold)
    room = round(s_max * share)
    if room < 1:
        raise ValueError(f"s_max {s_max} is too small; at least one block must be tracked")
    stack, heap, scalars, salt = empty(room + 2), np.zeros(room + 2, np.int64), np.array([P, 0], np.int64), salt_of(seed)
    found, start = [(np.empty(0, np.int64), np.empty((0, 2)))], 0
    for part in parts(chains, 1 << 16):
        blocks, points = np.empty(part.blocks, np.int64), np.empty((part.blocks, 2))
        pieces = np.empty(int(np.max(np.diff(part.offsets), initial=0)), np.int64)
        n = _touch(stack, heap, scalars, part.offsets, part.hashes, salt, room, index, count, pieces, blocks, points)
        found.append((blocks[:n] + start, points[:n].copy()))
        start += part.blocks
    blocks, points = (np.concatenate(column) for column in zip(*found, strict=True))
    return Sample(blocks, points[:, 0] / share, points[:, 1] / share).curve(chains, adj)


@nb.njit(cache=True, nogil=True)
def _sink(stack: Tracked, heap: I64, size: int) -> None:
    """Restore the heap (largest hash value first) below a new first item."""
    at, item = 0, heap[0]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and hash_value(stack, heap[child + 1]) > hash_value(stack, heap[child]):
            child += 1
        if hash_value(stack, heap[child]) <= hash_value(stack, item):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = item


@nb.njit(cache=True, nogil=True)
def _rise(stack: Tracked, heap: I64, at: int) -> None:
    """Restore the heap above a new last item."""
    item = heap[at]
    while at > 0 and hash_value(stack, heap[(at - 1) // 2]) < hash_value(stack, item):
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = item


@nb.njit(cache=True, nogil=True)
def _shrink(stack: Tracked, heap: I64, scalars: I64) -> None:
    """Lower the threshold to the largest hash value tracked, and drop what is no longer below it."""
    scalars[0] = hash_value(stack, heap[0])
    while scalars[1] > 0 and hash_value(stack, heap[0]) >= scalars[0]:
        drop(stack, heap[0])
        scalars[1] -= 1
        heap[0] = heap[scalars[1]]
        if scalars[1] > 0:
            _sink(stack, heap, scalars[1])


@nb.njit(cache=True, nogil=True)
def _touch(
    stack: Tracked, heap: I64, scalars: I64, offsets: I64, hashes: U64, salt: Any, s_max: int, index: int, count: int,
    pieces: I64, blocks: I64, points: F64,
) -> int:  # fmt: skip
    """Sampled references of these requests: their index into `blocks`, distance (-1 cold) and weight into `points`; how many.

    `scalars` is (threshold, heap size); `pieces` has room for one request.
    """
    n = 0
    for request in range(offsets.size - 1):
        sampled = 0
        for i in range(offsets[request], offsets[request + 1]):
            bits = mixed(hashes[i], salt)
            if value_of(bits) < scalars[0] and not left_out(bits, index, count):
                entry, rate = find(stack, hashes[i], bits), scalars[0] / P
                blocks[n], points[n, 0], points[n, 1] = i, above(stack, entry) / rate if entry >= 0 else -1.0, 1.0 / rate
                pieces[sampled] = i
                sampled, n = sampled + 1, n + 1
        for j in range(sampled - 1, -1, -1):
            key = hashes[pieces[j]]
            bits = mixed(key, salt)
            if value_of(bits) < scalars[0]:
                entry = find(stack, key, bits)
                if entry < 0:
                    entry = insert(stack, key, bits)
                    heap[scalars[1]] = entry
                    scalars[1] += 1
                    _rise(stack, heap, scalars[1] - 1)
                touch(stack, entry, 1.0)
                if stack.at[LIVE] > s_max:
                    _shrink(stack, heap, scalars)
    return n
