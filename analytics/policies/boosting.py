"""Gradient-boosted regression trees small enough to be trained inside a walk: binned features, squared loss, depth three."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.queues import kernel

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]

BINS, DEPTH, TREES = 64, 3, 16
INNER, LEAVES = (1 << DEPTH) - 1, 1 << DEPTH
SHRINK, LEAST_IN_LEAF, PENALTY = 0.3, 8.0, 1.0


class Forest(NamedTuple):
    """`feature`, `above` int32[TREES, INNER]: right where the feature's bin is above · `leaf` float64[TREES, LEAVES] · `base` float64[1].

    For training: `x` uint8[room, features], `y` float64[room], `rest` float64[room], `node` int32[room], `sums` float64[LEAVES, 2, BINS].
    """

    feature: I32
    above: I32
    leaf: F64
    base: F64
    x: U8
    y: F64
    rest: F64
    node: I32
    sums: F64


def make_forest(room: int, features: int) -> Forest:
    """A forest that says 0, and room for as many examples."""
    return Forest(
        np.zeros((TREES, INNER), np.int32), np.full((TREES, INNER), BINS, np.int32), np.zeros((TREES, LEAVES)), np.zeros(1),
        np.zeros((room, features), np.uint8), np.zeros(room), np.zeros(room), np.zeros(room, np.int32), np.zeros((LEAVES, 2, BINS)),
    )  # fmt: skip


@kernel
def bin_of(value: float) -> int:
    """Bin of a value from 0 up: four to the octave up to 2^16."""
    return min(int(4.0 * np.log2(1.0 + max(value, 0.0))), BINS - 1)


@kernel
def predict(forest: Forest, x: U8) -> float:
    """What the forest says of uint8[features]. Cost: TREES * DEPTH steps."""
    out = forest.base[0]
    for tree in range(TREES):
        node = 0
        for _ in range(DEPTH):
            node = 2 * node + 1 + (x[forest.feature[tree, node]] > forest.above[tree, node])
        out += forest.leaf[tree, node - INNER]
    return out


@kernel
def fit(forest: Forest, count: int) -> None:
    """Learn the first `count` examples anew. Cost: O(TREES * DEPTH * count * features). Source: Friedman, Annals of Statistics 2001."""
    mean = 0.0
    for i in range(count):
        mean += forest.y[i] / count
    forest.base[0] = mean
    for i in range(count):
        forest.rest[i] = forest.y[i] - mean
    for tree in range(TREES):
        forest.node[:count] = 0
        for depth in range(DEPTH):
            _grow(forest, count, tree, (1 << depth) - 1, 1 << depth)
        _fill_leaves(forest, count, tree)


@kernel
def _grow(forest: Forest, count: int, tree: int, first: int, width: int) -> None:
    """Split every node of a level where it gains most, then send the examples down."""
    for k in range(width):
        forest.feature[tree, first + k], forest.above[tree, first + k] = 0, BINS
    best = forest.leaf[tree]
    best[:] = 1e-9
    for feature in range(forest.x.shape[1]):
        forest.sums[:] = 0.0
        for i in range(count):
            k = forest.node[i] - first
            forest.sums[k, 0, forest.x[i, feature]] += 1.0
            forest.sums[k, 1, forest.x[i, feature]] += forest.rest[i]
        for k in range(width):
            _split(forest, tree, first, k, feature, best)
    for i in range(count):
        node = forest.node[i]
        forest.node[i] = 2 * node + 1 + (forest.x[i, forest.feature[tree, node]] > forest.above[tree, node])


@kernel
def _split(forest: Forest, tree: int, first: int, k: int, feature: int, best: F64) -> None:
    n = total = 0.0
    for b in range(BINS):
        n += forest.sums[k, 0, b]
        total += forest.sums[k, 1, b]
    left = below = 0.0
    for b in range(BINS - 1):
        left += forest.sums[k, 0, b]
        below += forest.sums[k, 1, b]
        right, over = n - left, total - below
        if left < LEAST_IN_LEAF or right < LEAST_IN_LEAF:
            continue
        gain = below * below / (left + PENALTY) + over * over / (right + PENALTY) - total * total / (n + PENALTY)
        if gain > best[k]:
            best[k] = gain
            forest.feature[tree, first + k], forest.above[tree, first + k] = feature, b


@kernel
def _fill_leaves(forest: Forest, count: int, tree: int) -> None:
    forest.sums[:, :, 0] = 0.0
    for i in range(count):
        forest.sums[forest.node[i] - INNER, 0, 0] += 1.0
        forest.sums[forest.node[i] - INNER, 1, 0] += forest.rest[i]
    for leaf in range(LEAVES):
        forest.leaf[tree, leaf] = SHRINK * forest.sums[leaf, 1, 0] / (forest.sums[leaf, 0, 0] + PENALTY)
    for i in range(count):
        forest.rest[i] -= forest.leaf[tree, forest.node[i] - INNER]
