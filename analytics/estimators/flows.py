"""FLOWS: one sample in which the object curve and the byte curve are equally sure, where blocks differ in size.

Half of the budget samples objects alike, half in proportion to their size; a small exact LRU in front takes the hottest off the sample.
Built from a description of the algorithm. Source: FLOWS, Balanced MRC profiling for heterogeneous object-size cache, EuroSys 2024.
"""

from __future__ import annotations

import math
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.exact import windows
from analytics.estimators.points import accumulate, block_sizes, block_values, covered
from analytics.estimators.sampling import Fold, P, folding, left_out, mixed, salt_of, threshold_of, value_of
from analytics.estimators.tracked import BOUND, Tracked, above, drop, empty, find, hash_value, insert, reweigh, touch, wider
from analytics.reuse.chains import ChainColumns

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_RESIDUAL_POINTS = 8
_STEP_BLOCKS = 1 << 12


def flows(
    chains: ChainColumns,
    *,
    rate: float = 0.1,
    slide: float = 0.5,
    front: int | None = None,
    adj: bool = False,
    seed: int = 0,
    fold: Fold | None = None,
) -> Curve:
    """Curve whose `blocks` are the object curve and whose `tokens` are the byte curve, of an LRU that holds capacity * block_size tokens.

    A block is an object sample with probability rate * (1 - slide), a byte sample with rate * slide * size / mean size; sampled as either
    it stands in the stack for size / (the larger of the two). `front` blocks (log10(1/rate)/rate by default) are tracked exactly. The
    samples are scaled to the rest; with `adj` what they miss of the whole is spread just above the front instead, as in FLOWS, which errs
    more on prefix chains (mean error at 10 % on the traces of docs/estimators.md 0.0034 to 0.0036, but 0.010 on RAGPulse and 0.08 on Zipf
    1.0, where `adj` has 0.005 and 0.008). Equal to `weighted` while no more than `front` blocks are distinct.
    Raises `ValueError` for a rate outside (0, 1] or a slide outside [0, 1].
    Cost: one probe and a tree walk or two a block, since all pass the front; memory O(front + rate * blocks).
    """
    if not 0.0 <= slide <= 1.0:
        raise ValueError(f"slide {slide} must be at least 0 and at most 1")
    threshold_of(rate)
    (index, count, share), salt = folding(fold), salt_of(seed)
    front = math.ceil(math.log10(1 / rate) / rate) if front is None else front
    sizes, whole = block_sizes(chains), covered(chains)
    mean = whole[1] / whole[0] if whole[0] else 1.0
    rates = np.array([rate * (1 - slide), rate * slide / mean, share])
    stack, inside, found, start = empty(1024), np.zeros(1, np.int64), [(np.empty(0, np.int64), np.empty((0, 4)))], 0
    for first, last in windows(chains.offsets, _STEP_BLOCKS):
        part = chains.slice(first, last)
        stack = wider(stack, part.blocks)
        blocks, points = np.empty(part.blocks, np.int64), np.empty((part.blocks, 4))
        own = sizes[start : start + part.blocks]
        n = _touch(stack, inside, part.offsets, part.hashes, own, salt, rates, front, index, count, blocks, points)
        found.append((blocks[:n] + start, points[:n].copy()))
        start += part.blocks
    blocks, points = (np.concatenate(column) for column in zip(*found, strict=True))
    return _curve(chains, blocks, points, sizes[blocks], front * mean / chains.block_size, adj)


def _curve(chains: ChainColumns, blocks: I64, points: F64, own: I64, front: float, adj: bool) -> Curve:
    tokens, context = block_values(chains, blocks)
    values = np.vstack([points[:, 1], tokens * points[:, 2], context * points[:, 2]])
    reused, inside = points[:, 0] >= 0, points[:, 3] > 0
    distances, whole, seen = (points[:, 0] + own - 1) / chains.block_size, covered(chains), values.sum(axis=1)
    if not adj:
        certain = values[:, inside].sum(axis=1)
        scale = np.divide(whole - certain, seen - certain, out=np.ones(3), where=seen > certain)
        return accumulate(chains, distances[reused], (values * np.where(inside, 1.0, scale[:, None]))[:, reused])
    spread = front * (1 + np.arange(_RESIDUAL_POINTS) / _RESIDUAL_POINTS)
    residual = np.repeat(((whole - seen) / _RESIDUAL_POINTS)[:, None], _RESIDUAL_POINTS, axis=1)
    return accumulate(chains, np.concatenate([distances[reused], spread]), np.concatenate([values[:, reused], residual], axis=1))


@nb.njit(cache=True, nogil=True)
def _demote(stack: Tracked, inside: I64, front: int, rates: F64, index: int, count: int) -> None:
    """Let the oldest leave the front until it fits: sampled they stay, at the weight that they stand for."""
    while inside[0] > front:
        stack.at[BOUND] += 1
        entry = stack.owners[stack.at[BOUND]]
        if entry >= 0:
            inside[0] -= 1
            chance = min(max(rates[0], rates[1] * stack.weights[entry]), 1.0)
            if hash_value(stack, entry) < chance * P and not left_out(stack.bits[entry], index, count):
                reweigh(stack, entry, stack.weights[entry] / (chance * rates[2]))
            else:
                drop(stack, entry)


@nb.njit(cache=True, nogil=True)
def _touch(
    stack: Tracked, inside: I64, offsets: I64, hashes: U64, sizes: I64, salt: Any, rates: F64, front: int, index: int, count: int,
    blocks: I64, points: F64,
) -> int:  # fmt: skip
    """References that count: index into `blocks`, (tokens above or -1, weight as an object, as bytes, whether in front) into
    `points`; how many.

    `rates` is (object rate, byte rate per token, share that a fold keeps); `inside` how many blocks the front holds.
    """
    n = 0
    for request in range(offsets.size - 1):
        for i in range(offsets[request], offsets[request + 1]):
            bits = mixed(hashes[i], salt)
            entry, value = find(stack, hashes[i], bits), value_of(bits)
            blocks[n], points[n, 0] = i, above(stack, entry) if entry >= 0 else -1.0
            if entry >= 0 and stack.slots[entry] > stack.at[BOUND]:
                points[n, 1], points[n, 2], points[n, 3] = 1.0, 1.0, 1.0
                n += 1
            elif not left_out(bits, index, count):
                points[n, 3] = 0.0
                by_size = min(rates[1] * sizes[i], 1.0)
                points[n, 1] = 1.0 / (rates[0] * rates[2]) if value < rates[0] * P else 0.0
                points[n, 2] = 1.0 / (by_size * rates[2]) if value < by_size * P else 0.0
                n += points[n, 1] + points[n, 2] > 0.0
        for i in range(offsets[request + 1] - 1, offsets[request] - 1, -1):
            bits = mixed(hashes[i], salt)
            entry = find(stack, hashes[i], bits)
            if entry < 0:
                entry = insert(stack, hashes[i], bits)
            inside[0] += stack.slots[entry] <= stack.at[BOUND]
            touch(stack, entry, float(sizes[i]))
            _demote(stack, inside, front, rates, index, count)
    return n
