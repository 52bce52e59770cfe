"""What routers remember between decisions: one bundle of arrays for all of them, so that one kernel can call any."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

# Counters: the instance chosen last, draws made, entries written to and expired from the ring, and what the router noticed.
LAST, DRAWS, WRITTEN, EXPIRED, NOTICED, COUNTERS = range(6)
RING = 1 << 14  # decisions that a sliding window can hold
FEATURES = 8
TERMS = 8
BINS = 128  # of a histogram over the logarithm of time


class Memory(NamedTuple):
    """State of one router. Arrays that a router does not use have length 1 (`Needs` says which it does)."""

    params: npt.NDArray[np.float64]
    seed: npt.NDArray[np.uint64]
    counters: npt.NDArray[np.int64]
    score: npt.NDArray[np.float64]  # [instances], scratch
    allowed: npt.NDArray[np.bool_]  # [instances], scratch
    home: npt.NDArray[np.int32]  # [3, keys]: of sessions, of first blocks, of tenants
    older: npt.NDArray[np.int32]  # [1 + blocks, instances]: LRU list of each instance, entry 0 its ends
    newer: npt.NDArray[np.int32]
    tree: npt.NDArray[np.int64]  # [instances]: blocks in each list
    ring: npt.NDArray[np.int64]  # [RING, 4]: the last decisions
    window: npt.NDArray[np.int64]  # [instances, 4]: sums over the ring
    classes: npt.NDArray[np.int64]  # [keys, 4]: per class of requests (first block), or per session
    features: npt.NDArray[np.float64]  # [requests, FEATURES]: of every request, where it was placed
    model: npt.NDArray[np.float64]  # [FEATURES + 2, FEATURES]: what a learner has learned
    rates: npt.NDArray[np.float64]  # [instances + 1, 5]: decaying sums, the last row those of the fleet
    reuse: npt.NDArray[np.float64]  # [BINS, 2]: decaying histogram of reuse times
    touched: npt.NDArray[np.int64]  # [blocks]: when a block was last asked for
    expected: npt.NDArray[np.int32]  # [blocks, instances]: the last placement there that named the block, as a serial from 1
    placements: npt.NDArray[np.int64]  # [instances]: requests placed there so far
    terms: npt.NDArray[np.float64]  # [instances, TERMS]: of the last decision, for explanations


@dataclass(frozen=True)
class Needs:
    """Which of the large arrays a router uses."""

    homes: bool = False
    trees: bool = False
    window: bool = False
    classes: bool = False
    learner: bool = False
    curves: bool = False


@dataclass(frozen=True)
class Sizes:
    """Upper ends (exclusive) of what a router will be asked about."""

    requests: int = 1
    keys: int = 1  # sessions, first blocks and tenants alike
    blocks: int = 1


def new_memory(instances: int, seed: int, params: tuple[float, ...], needs: Needs, sizes: Sizes) -> Memory:
    """Memory of a router that has decided nothing. Ties and draws depend on `seed` only."""
    keys = sizes.keys if needs.homes or needs.classes else 1
    listed = sizes.blocks if needs.trees else 0
    counters = np.zeros(COUNTERS, np.int64)
    counters[LAST] = random.Random(seed).randrange(1 << 16)
    links = [np.full((listed + 1, instances), -1, np.int32) for _ in range(2)]
    for link in links:
        link[0] = 0
    blocks = sizes.blocks if needs.curves else 1
    return Memory(
        np.array([*params, *([0.0] * (8 - len(params)))], np.float64),
        np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64),
        counters,
        np.zeros(instances),
        np.zeros(instances, np.bool_),
        np.full((3, keys), -1, np.int32),
        links[0],
        links[1],
        np.zeros(instances, np.int64),
        np.zeros((RING if needs.window else 1, 4), np.int64),
        np.zeros((instances, 4), np.int64),
        np.zeros((keys if needs.classes else 1, 4), np.int64),
        np.zeros((sizes.requests if needs.learner else 1, FEATURES)),
        np.zeros((FEATURES + 2, FEATURES)),
        np.zeros((instances + 1, 5)),
        np.zeros((BINS, 2)),
        np.full(blocks, -1, np.int64),
        np.zeros((blocks, instances), np.int32),
        np.zeros(instances, np.int64),
        np.zeros((instances, TERMS)),
    )


def grown(m: Memory, needs: Needs, sizes: Sizes) -> Memory:
    """The same memory with room for `sizes`; arrays that have it stay, others at least double. For callers that learn sizes as they go."""

    def longer(array: npt.NDArray[Any], length: int, fill: int, axis: int = 0) -> npt.NDArray[Any]:
        have = array.shape[axis]
        if length <= have:
            return array
        shape = list(array.shape)
        shape[axis] = max(length, 2 * have) - have
        return np.concatenate([array, np.full(shape, fill, array.dtype)], axis=axis)

    if needs.homes:
        m = m._replace(home=longer(m.home, sizes.keys, -1, 1))
    if needs.trees:
        m = m._replace(older=longer(m.older, sizes.blocks + 1, -1), newer=longer(m.newer, sizes.blocks + 1, -1))
    if needs.classes:
        m = m._replace(classes=longer(m.classes, sizes.keys, 0))
    if needs.learner:
        m = m._replace(features=longer(m.features, sizes.requests, 0))
    if needs.curves:
        m = m._replace(touched=longer(m.touched, sizes.blocks, -1), expected=longer(m.expected, sizes.blocks, 0))
    return m


@njit(cache=True, nogil=True)
def least(v: Any, m: Any) -> Any:
    """Least `m.score` among the instances that are up; equals take turns, from a seeded start, so that an idle fleet fills evenly."""
    n = m.score.size
    lowest, best = np.inf, -1
    for step in range(1, n + 1):
        i = (m.counters[LAST] + step) % n
        if v.up[i] and (best < 0 or m.score[i] < lowest):
            lowest, best = m.score[i], i
    m.counters[LAST] = best
    return best


@njit(cache=True, nogil=True)
def draw(m: Any, below: Any) -> Any:
    """A uniform integer in 0..below-1, the next of this router's stream (splitmix64 of its counter)."""
    m.counters[DRAWS] += 1
    x = m.seed[0] + np.uint64(m.counters[DRAWS]) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return np.int64(x >> np.uint64(32)) * below >> 32
