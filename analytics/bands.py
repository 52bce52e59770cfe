"""Confidence bands round a curve: how far the true curve may lie from the one that is shown.

Two kinds of not knowing. A sampled curve stands for the exact curve of the same trace: leaving out one hash shard of the sample after
another says how much it depends on which blocks were drawn (`jackknife_band`). An exact curve stands for the load that it was taken from:
drawing its windows anew says how much it depends on when it was taken (`window_band`).
Sources: delete-a-group jackknife, Kott 2001; circular block bootstrap, Politis and Romano 1992.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr
from scipy.stats import norm, t

from analytics.curve import Curve, Weight
from analytics.estimators.sampling import Fold

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Band:
    """Hit ratio at every capacity and the pointwise interval round it, float64[c] each, 0 to 1."""

    ratio: F64
    low: F64
    high: F64

    def covers(self, truth: F64) -> npt.NDArray[np.bool_]:
        """At which capacities the interval holds `truth`."""
        return (self.low <= truth) & (truth <= self.high)


def jackknife_band(
    estimate: Callable[[Fold | None], Curve],
    capacities: Sequence[int] | I64,
    *,
    rate: float,
    shards: int = 32,
    level: float = 0.95,
    weight: Weight = "blocks",
) -> Band:
    """Band of a sampled curve for the exact curve of its trace; pointwise at `level`.

    `estimate` makes the curve without one fold of its sample, as in `lambda fold: shards_hot(chains, seed=3, fold=fold)`; `rate` is the
    share of the blocks that it samples, since a sample of everything is sure. Student's t with `shards` - 1 degrees. It is honest where the
    sample is large enough (capacities above about 50 / rate) and no block that is not always tracked carries much load: use `shards_hot`.
    At 95 % and 8 % of the blocks it holds the exact curve at 95 to 97 % of capacities on Zipf 0.8 and 0.9 and on both Mooncake traces, but
    at 66 % on RAGPulse, where all reuse is that of 19 blocks of which `shards_hot` finds 7 in the first tenth of a week: look for hot
    blocks in all of such a trace (`head=1.0`: 98 %).
    Raises `ValueError` for fewer than 2 shards. Cost: `shards` + 1 estimates.
    """
    if shards < 2:
        raise ValueError(f"{shards} shards; a jackknife needs at least 2")
    ratio = estimate(None).hit_ratio(capacities, weight)
    without = np.array([estimate(Fold(index, shards)).hit_ratio(capacities, weight) for index in range(shards)])
    variance = (shards - 1) / shards * ((without - without.mean(axis=0)) ** 2).sum(axis=0) * (1.0 - rate)
    reach = t.ppf(0.5 + level / 2, shards - 1) * np.sqrt(variance)
    return Band(ratio, np.clip(ratio - reach, 0.0, 1.0), np.clip(ratio + reach, 0.0, 1.0))


def window_band(hits: F64, totals: F64, *, level: float = 0.95, draws: int = 1000, run_windows: int = 3, seed: int = 0) -> Band:
    """Band of an exact curve for the load behind it, from its windows; pointwise at `level`.

    `hits` float64[w, c] of each window at each capacity and `totals` float64[w] of the same weight. Runs of `run_windows` windows are drawn
    together: 3 where windows share nothing but the reuse across their edge, about 8 where half of a swing is still there in the next one.
    Windows must be alike: leave out those in which the stack still fills.
    Bias-corrected percentiles, widened by t / z and sqrt(runs / (runs - 1)) for the few runs that they are drawn from.
    Raises `ValueError` for fewer than 2 runs. Cost: O(draws * windows * capacities).
    """
    windows, runs = totals.size, totals.size // run_windows
    if runs < 2:
        raise ValueError(f"{windows} windows in runs of {run_windows}; a bootstrap needs at least 2 runs")
    starts = np.random.default_rng(seed).integers(0, windows, (draws, runs))
    drawn = (starts[:, :, None] + np.arange(run_windows)).reshape(draws, -1) % windows
    times = np.zeros((draws, windows))
    np.add.at(times, (np.arange(draws)[:, None], drawn), 1.0)
    ratio = hits.sum(axis=0) / totals.sum()
    resampled = (times @ hits) / (times @ totals)[:, None]
    low, high = _percentiles(resampled, ratio, level, runs)
    return Band(ratio, np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0))


def _percentiles(resampled: F64, ratio: F64, level: float, runs: int) -> tuple[F64, F64]:
    """Bias-corrected percentiles of every column, stretched round `ratio` for the number of runs."""
    stretch = t.ppf(0.5 + level / 2, runs - 1) / norm.ppf(0.5 + level / 2) * np.sqrt(runs / (runs - 1))
    below = np.clip(((resampled < ratio).mean(axis=0) + (resampled <= ratio).mean(axis=0)) / 2, 1e-3, 1 - 1e-3)
    bias, reach = norm.ppf(below), norm.ppf(0.5 + level / 2)
    edges = [np.diagonal(np.quantile(resampled, ndtr(2 * bias + side * reach), axis=0)) for side in (-1, 1)]
    low, high = (ratio + stretch * (edge - ratio) for edge in edges)
    return low, high
