"""Change detection on a ratio per window: when did it move, by how much, and is that more than its own noise.

`DETECTORS` maps a name to a function (ratio, weight, rng) -> Change | None. Adding one is a function, a line and a right answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_WINDOWS = 720


@dataclass(frozen=True)
class Change:
    """Windows [onset, end) sit at `after` while those before sit at `before`; `end` is the series' length if the change lasts.

    `p_value` is the chance that autocorrelated noise without a change looks this much like one.
    """

    onset: int
    end: int
    before: float
    after: float
    p_value: float


@dataclass(frozen=True)
class Load:
    """Relative change of load per window between two stretches; `flat` if both stay within 10 %."""

    requests: float
    prompt_tokens: float

    @property
    def flat(self) -> bool:
        """True when neither requests nor prompt tokens moved by 10 % or more."""
        return abs(self.requests) < 0.1 and abs(self.prompt_tokens) < 0.1


def load_change(requests: Floats, prompt_tokens: Floats, before: NDArray[np.bool_], after: NDArray[np.bool_]) -> Load:
    """Load of the median window `after` against `before` (a cut-off last minute does not count); inf where there was none before."""

    def relative(series: Floats) -> float:
        old, new = float(np.median(series[before])), float(np.median(series[after]))
        return (new - old) / old if old else (0.0 if new == 0 else float("inf"))

    return Load(relative(requests), relative(prompt_tokens))


def step(
    ratio: Floats,
    weight: Floats,
    rng: np.random.Generator,
    *,
    direction: int = -1,
    recovers: bool = False,
    min_length: int = 3,
    min_effect: float = 0.02,
    alpha: float = 0.01,
    simulations: int = 499,
) -> Change | None:
    """The one change of level that explains most of a weighted series, or None if it is small or could be noise.

    `ratio` per window (NaN or weight 0: left out), `weight` prompt tokens per window. `direction` -1 looks for declines, +1 for rises,
    0 for both. With `recovers` the level may return after `end` (an epidemic alternative). Least squares finds the stretch; its p-value is
    the share of simulated AR(1) series (same length, weights and lag-1 correlation, no change) whose best stretch explains as much. The
    correlation is that of the residuals with its small-sample bias added back, so positive autocorrelation does not raise alarms.
    Only the last 720 windows are looked at. Cost: O(windows^2 * simulations), 0.1 s for 720 windows.
    """
    known = np.flatnonzero(np.isfinite(ratio) & (weight > 0))[-MAX_WINDOWS:]
    if known.size < 2 * min_length:
        return None
    x = np.ascontiguousarray(ratio[known], np.float64)
    w = np.ascontiguousarray(weight[known], np.float64) / float(weight[known].mean())
    share, first, stop = best_stretch(x, w, min_length, direction, recovers)
    if stop <= first:
        return None
    before, after = _mean(x, w, 0, first), _mean(x, w, first, stop)
    if abs(after - before) < min_effect:
        return None
    noise = _null_series(_residual_correlation(x, w, first, stop, 4 if recovers else 3), w, simulations, rng)
    beaten = sum(best_stretch(series, w, min_length, direction, recovers)[0] >= share for series in noise)
    p_value = (1 + beaten) / (1 + simulations)
    if p_value > alpha:
        return None
    end = int(known[stop]) if stop < known.size else int(ratio.size)
    return Change(int(known[first]), end, before, after, p_value)


def dip(ratio: Floats, weight: Floats, rng: np.random.Generator) -> Change | None:
    """A decline that may recover before the series ends, such as a restart; otherwise as `step`."""
    return step(ratio, weight, rng, recovers=True)


DETECTORS: dict[str, Callable[[Floats, Floats, np.random.Generator], Change | None]] = {"step": step, "dip": dip}


@njit(cache=True, nogil=True)
def best_stretch(x: Floats, w: Floats, min_length: int, direction: int, recovers: bool) -> tuple[float, int, int]:
    """(explained share of the weighted variance, first, stop) of the stretch whose own level fits best; (0, 0, 0) if none may.

    Both sides keep at least `min_length` windows. Cost: O(n), or O(n^2) with `recovers`.
    """
    n = x.size
    cw, cx = np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n):
        cw[i + 1] = cw[i] + w[i]
        cx[i + 1] = cx[i] + w[i] * x[i]
    mean = cx[n] / cw[n]
    total = 0.0
    for i in range(n):
        total += w[i] * (x[i] - mean) ** 2
    if total <= 0.0:
        return 0.0, 0, 0
    best, first, stop = 0.0, 0, 0
    for i in range(min_length, n - min_length + 1):
        low = i + min_length if recovers else n
        for j in range(low, n + 1):
            if n - j < min_length and j != n:
                continue
            inside = cw[j] - cw[i]
            difference = (cx[j] - cx[i]) / inside - (cx[n] - cx[j] + cx[i]) / (cw[n] - inside)
            if direction * difference < 0.0:
                continue
            gain = inside * (cw[n] - inside) / cw[n] * difference * difference / total
            if gain > best:
                best, first, stop = gain, i, j
    return best, first, stop


def _mean(x: Floats, w: Floats, first: int, stop: int) -> float:
    return float(np.average(x[first:stop], weights=w[first:stop]))


def _residual_correlation(x: Floats, w: Floats, first: int, stop: int, fitted: int) -> float:
    # Each fitted quantity (levels and searched borders) pulls the raw correlation down by (1 + 3 r) / n; put it back.
    inside = np.zeros(x.size, bool)
    inside[first:stop] = True
    residual = np.where(inside, x - np.average(x[inside], weights=w[inside]), x - np.average(x[~inside], weights=w[~inside]))
    residual = residual * np.sqrt(w)
    power = float(residual @ residual)
    raw = float(residual[1:] @ residual[:-1]) / power if power else 0.0
    return float(np.clip(raw + fitted * (1.0 + 3.0 * raw) / x.size, 0.0, 0.9))


def _null_series(correlation: float, w: Floats, simulations: int, rng: np.random.Generator) -> Floats:
    series = rng.standard_normal((simulations, w.size))
    for t in range(1, w.size):
        series[:, t] = correlation * series[:, t - 1] + np.sqrt(1.0 - correlation**2) * series[:, t]
    return np.ascontiguousarray(series / np.sqrt(w))
