"""Estimators of the curve: a registry of functions from chains to a `Curve`. A new one is a function, a line and a right answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from analytics.curve import Curve, DistanceHistogram
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.olken import olken_distances
from analytics.reuse.run_exact import Runs, RunStack

I64 = npt.NDArray[np.int64]

# Requests in one go: large enough that a call costs nothing, small enough that its runs stay in the cache.
_STEP_REQUESTS = 1 << 14


class Estimator(Protocol):
    """Curve of the LRU stack that sees all of `chains`, in their order; the hashes are the keys, so tenants must not share any."""

    def __call__(self, chains: ChainColumns) -> Curve: ...


def run_exact(chains: ChainColumns) -> Curve:
    """Exact curve by the run-level stack (`analytics.reuse.run_exact`). Cost: O(blocks) compares, one tree operation a run."""
    stack, histogram = RunStack(), DistanceHistogram(chains.block_size)
    for part in _parts(chains):
        histogram.add(stack.touch(part.ts_us, part.offsets, part.hashes), part)
    return histogram.curve()


def olken(chains: ChainColumns) -> Curve:
    """Exact curve by one tree operation a block (`analytics.reuse.olken`): the reference. Cost: O(blocks log distinct)."""
    ids, distinct = densify(chains.hashes)
    distances, ages = olken_distances(chains.ts_us, chains.offsets, ids, distinct)
    histogram, end = DistanceHistogram(chains.block_size), 0
    for part in _parts(chains):
        start, end = end, end + part.blocks
        histogram.add(_single_blocks(distances[start:end], ages[start:end], part), part)
    return histogram.curve()


ESTIMATORS: dict[str, Estimator] = {"run_exact": run_exact, "olken": olken}


def _parts(chains: ChainColumns) -> Iterator[ChainColumns]:
    for start in range(0, chains.requests, _STEP_REQUESTS):
        yield chains.slice(start, start + _STEP_REQUESTS)


def _single_blocks(distances: I64, ages: I64, chains: ChainColumns) -> Runs:
    """Every block as a run of its own."""
    lengths = np.diff(chains.offsets)
    request = np.repeat(np.arange(chains.requests, dtype=np.int32), lengths)
    position = np.arange(distances.size) - np.repeat(chains.offsets[:-1], lengths)
    ones = np.ones(distances.size, np.int32)
    return Runs(request, position.astype(np.int32), ones, distances, ages, np.zeros_like(ones))
