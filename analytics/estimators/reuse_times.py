"""Reuse times in block references, and the mean distance that they imply: what AET and StatStack are made of.

Touches are numbered one by one, tail of a request first. A block touched at u and looked up by a request whose first touch is t has
reuse time t - 1 - u: the touches in between. One of them, k touches before the look-up, still stands above the block iff it was the last
touch of its own block, that is iff its step (touches to the next touch of the same block) is at least k. Summed over k and with steps
taken from the whole trace, a reuse time of r means a distance of mean(min(step, r)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.points import accumulate, block_sizes
from analytics.estimators.sampling import mixed, salt_of, value_of
from analytics.reuse.bins import N_BINS, bin_of
from analytics.reuse.chains import ChainColumns, densify

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

# Rows of the table of log bins.
STEPS, STEP_SUM, REUSES, REUSE_SUM, TOKENS, CONTEXT = range(6)


@dataclass(frozen=True)
class ReuseTimes:
    """Log-binned reuse times: `table` float64[6, N_BINS] (rows as named above), of `watched` touches out of all.

    Sums beside the counts make a bin stand at the mean of what it holds, so that a trace with one reuse time is exact whatever it is.
    """

    table: F64
    watched: int

    def mean_distance(self, reuse: F64, cold: bool) -> F64:
        """Mean distance of each reuse time: mean(min(step, reuse)) over the watched touches.

        `cold` counts touches that never came back, with an infinite step (AET); without, they are left out (StatStack). Cost: O(bins).
        """
        counts, sums = self.table[STEPS], self.table[STEP_SUM]
        held = counts > 0
        means, weights = sums[held] / counts[held], counts[held]
        never = (self.watched - weights.sum()) if cold else 0.0
        below = np.searchsorted(means, reuse, side="right")
        done = np.concatenate([[0.0], np.cumsum(means * weights)])[below]
        longer = weights.sum() - np.concatenate([[0.0], np.cumsum(weights)])[below]
        whole = weights.sum() + never
        return (done + reuse * (longer + never)) / whole if whole else np.zeros_like(reuse)

    def curve(self, chains: ChainColumns, cold: bool) -> Curve:
        """Every bin's hits at the mean distance of its mean reuse time."""
        held = self.table[REUSES] > 0
        reuse = self.table[REUSE_SUM, held] / self.table[REUSES, held]
        scale = chains.blocks / self.watched if self.watched else 1.0
        return accumulate(chains, self.mean_distance(reuse, cold), self.table[[REUSES, TOKENS, CONTEXT]][:, held] * scale)


def collect(chains: ChainColumns, threshold: int, seed: int) -> ReuseTimes:
    """Reuse times of the touches whose number hashes below `threshold`, each watched until its block comes back.

    Cost: one probe and one gather a block. Memory here O(distinct), since blocks are numbered first; the method needs the watched only.
    """
    ids, distinct = densify(chains.hashes)
    table = np.zeros((6, N_BINS), np.float64)
    sizes = block_sizes(chains) if chains.block_tokens is not None else np.empty(0, np.int64)
    watched = _collect(chains.offsets, ids, distinct, sizes, chains.prompt_tokens, chains.block_size, salt_of(seed), threshold, table)
    return ReuseTimes(table, watched)


@nb.njit(cache=True, nogil=True)
def _collect(offsets: I64, ids: I32, n_ids: int, sizes: I64, prompts: I64, block_size: int, salt: Any, threshold: int, table: F64) -> int:
    touched, watched = np.full(n_ids, -1, np.int64), 0
    for request in range(offsets.size - 1):
        lo, hi = offsets[request], offsets[request + 1]
        start = 0
        for i in range(lo, hi):
            size = block_size if i < hi - 1 else min(max(prompts[request] - start, 1), block_size)
            if sizes.size:
                size = sizes[i]
            if touched[ids[i]] >= 0:
                reuse = lo - 1 - touched[ids[i]]
                at = bin_of(reuse)
                table[REUSES, at] += 1
                table[REUSE_SUM, at] += reuse
                table[TOKENS, at] += size
                table[CONTEXT, at] += size * (start + size / 2)
            start += size
        now = lo
        for i in range(hi - 1, lo - 1, -1):
            before = touched[ids[i]]
            if before >= 0:
                at = bin_of(now - before)
                table[STEPS, at] += 1
                table[STEP_SUM, at] += now - before
            watch = value_of(mixed(now, salt)) < threshold
            watched += watch
            touched[ids[i]] = now if watch else -1
            now += 1
    return watched
