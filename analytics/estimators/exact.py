"""The two exact curves: by the run-level stack, and by Olken's tree a block, the reference beside which every estimator is checked.

Source: Mattson et al. 1970; Olken 1993 (LBL-32370). Both look up a request as a whole and touch it leaf first.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from analytics.curve import Curve, DistanceHistogram
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.olken import olken_distances
from analytics.reuse.run_exact import Runs, RunStack

I64 = npt.NDArray[np.int64]

# Requests in one go: large enough that a call costs nothing, small enough that its runs stay in the cache.
_STEP_REQUESTS = 1 << 14


def run_exact(chains: ChainColumns) -> Curve:
    """Exact curve by the run-level stack (`analytics.reuse.run_exact`). Cost: O(blocks) compares, one tree operation a run."""
    stack, histogram = RunStack(), DistanceHistogram(chains.block_size)
    for part in parts(chains):
        histogram.add(stack.touch(part.ts_us, part.offsets, part.hashes), part)
    return histogram.curve()


def olken(chains: ChainColumns) -> Curve:
    """Exact curve by one tree operation a block (`analytics.reuse.olken`): the reference. Cost: O(blocks log distinct)."""
    ids, distinct = densify(chains.hashes)
    distances, ages = olken_distances(chains.ts_us, chains.offsets, ids, distinct)
    histogram, end = DistanceHistogram(chains.block_size), 0
    for part in parts(chains):
        start, end = end, end + part.blocks
        histogram.add(_single_blocks(distances[start:end], ages[start:end], part), part)
    return histogram.curve()


def parts(chains: ChainColumns, step_requests: int = _STEP_REQUESTS) -> Iterator[ChainColumns]:
    """The chains cut into slices of `step_requests` requests, as views."""
    for start in range(0, chains.requests, step_requests):
        yield chains.slice(start, start + step_requests)


def windows(offsets: I64, window_blocks: int) -> list[tuple[int, int]]:
    """Ranges of whole requests of about `window_blocks` references each, one request at least."""
    cuts = np.searchsorted(offsets, np.arange(0, offsets[-1], max(window_blocks, 1)), side="left")
    ends = np.unique(np.append(cuts, [0, offsets.size - 1]))
    return [(int(first), int(last)) for first, last in zip(ends, ends[1:], strict=False)]


def _single_blocks(distances: I64, ages: I64, chains: ChainColumns) -> Runs:
    """Every block as a run of its own."""
    lengths = np.diff(chains.offsets)
    request = np.repeat(np.arange(chains.requests, dtype=np.int32), lengths)
    position = np.arange(distances.size) - np.repeat(chains.offsets[:-1], lengths)
    ones = np.ones(distances.size, np.int32)
    return Runs(request, position.astype(np.int32), ones, distances, ages, np.zeros_like(ones))
