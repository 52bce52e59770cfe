"""Locality-adaptive SHARDS: the sampling rate follows the working set, high where few blocks carry the load, low in scans.

Built from one line of description of LAShards (use locality and bursts to shrink and adapt the sample); the paper itself was not read, and
nothing here claims to be its algorithm. What is kept exact is the estimate's mean: a reuse is seen iff its block stayed sampled at every
rate since its last touch, so it counts 1 / (lowest rate since then), as does every block above it (Horvitz-Thompson).
"""

from __future__ import annotations

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.exact import windows
from analytics.estimators.points import Sample
from analytics.estimators.sampling import Fold, P, folding, left_out, mixed, salt_of, threshold_of, value_of
from analytics.estimators.tracked import BOUND, TOP, Tracked, above, drop, empty, find, hash_value, insert, reweigh, touch, wider
from analytics.reuse.chains import ChainColumns

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


def lashards(
    chains: ChainColumns,
    *,
    keys: int = 1024,
    window_blocks: int = 16384,
    rate_min: float = 0.01,
    adj: bool = True,
    seed: int = 0,
    fold: Fold | None = None,
) -> Curve:
    """Curve by SHARDS whose rate is set after every `window_blocks` references so that a window like it would touch `keys` sampled blocks.

    The rate stays between `rate_min` and 1 and starts at 1; equal to exact where no window touches more than `keys` distinct blocks. `adj`
    as in `shards` (mean error on the traces of docs/estimators.md 0.005 to 0.013, worst draw 0.03): the weight of what was sampled at each
    moment against the whole. Raises `ValueError` for a rate outside (0, 1].
    Cost: one hash a block, O(log) a sampled one, one pass over the tracked where the rate falls; memory O(tracked).
    """
    (index, count, share), floor, salt = folding(fold), threshold_of(rate_min), salt_of(seed)
    stack, threshold, found = empty(1024), P, [(np.empty(0, np.int64), np.empty((0, 3)))]
    for first, last in windows(chains.offsets, window_blocks):
        part, start = chains.slice(first, last), int(chains.offsets[first])
        stack = wider(stack, part.blocks)
        blocks, points = np.empty(part.blocks, np.int64), np.empty((part.blocks, 3))
        n, distinct = _touch(stack, part.offsets, part.hashes, salt, threshold, index, count, blocks, points)
        found.append((blocks[:n] + start, points[:n].copy()))
        wanted = threshold if not distinct else int(threshold * min(keys * share / distinct, P))
        lower, threshold = threshold, min(max(wanted, floor), P)
        if threshold < lower:
            _lower(stack, threshold)
    blocks, points = (np.concatenate(column) for column in zip(*found, strict=True))
    return _curve(chains, blocks, points / share, adj)


def _curve(chains: ChainColumns, blocks: I64, points: F64, adj: bool) -> Curve:
    """A reuse weighs by the lowest rate since the last touch; what of the stream was sampled, by the rate of the moment.

    The two differ, so a reuse is followed by a cold reference of the difference, which only the sum of weights sees.
    """
    distances, reused, present = points[:, 0], points[:, 1], points[:, 2]
    again = np.flatnonzero(distances >= 0)
    at = np.concatenate([blocks, blocks[again]])
    spread = np.concatenate([distances, np.full(again.size, -1.0)])
    weight = np.concatenate([np.where(distances >= 0, reused, present), (present - reused)[again]])
    order = np.argsort(at, kind="stable")
    return Sample(at[order], spread[order], weight[order]).curve(chains, adj)


@nb.njit(cache=True, nogil=True)
def _lower(stack: Tracked, threshold: int) -> None:
    """Drop what is no longer sampled; what stays stands for at least 1/rate."""
    weight = P / threshold
    for slot in range(1, stack.at[TOP] + 1):
        entry = stack.owners[slot]
        if entry >= 0:
            if hash_value(stack, entry) >= threshold:
                drop(stack, entry)
            elif stack.weights[entry] < weight:
                reweigh(stack, entry, weight)


@nb.njit(cache=True, nogil=True)
def _touch(
    stack: Tracked, offsets: I64, hashes: U64, salt: Any, threshold: int, index: int, count: int, blocks: I64, points: F64
) -> tuple[int, int]:
    """Sampled references of one window: index into `blocks`, (distance or -1, weight as a reuse, weight now) into `points`.

    Returns how many there are and how many distinct blocks they are.
    """
    n, distinct, weight = 0, 0, P / threshold
    stack.at[BOUND] = stack.at[TOP]
    for request in range(offsets.size - 1):
        first = n
        for i in range(offsets[request], offsets[request + 1]):
            bits = mixed(hashes[i], salt)
            if value_of(bits) < threshold and not left_out(bits, index, count):
                entry = find(stack, hashes[i], bits)
                blocks[n], points[n, 2] = i, weight
                points[n, 0] = above(stack, entry) if entry >= 0 else -1.0
                points[n, 1] = stack.weights[entry] if entry >= 0 else 0.0
                n += 1
        for j in range(n - 1, first - 1, -1):
            key = hashes[blocks[j]]
            bits = mixed(key, salt)
            entry = find(stack, key, bits)
            if entry < 0:
                entry = insert(stack, key, bits)
            distinct += stack.slots[entry] <= stack.at[BOUND]
            touch(stack, entry, weight)
    return n, distinct
