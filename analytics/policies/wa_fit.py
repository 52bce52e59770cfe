"""When blocks come back, per category of the request that touched them last: exponential fits of a sliding sample, and how good they are.

A category is a type of request and a turn. Of its touches a share q comes back after an exponential time of rate r, the others never. Both
are fitted by maximum likelihood to the newest `SAMPLE` touches of a spatial sample of blocks, those that have not come back yet counted as
such (an exponential cure model, by expectation maximisation). The fits depend on the trace only and use nothing that comes later.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import Trace

Bools = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

TYPES, TURNS = 8, 8  # types with groups of their own; turns 1, 2, 3, 4, 5-8, 9-16, above, and unknown
SAMPLE, LEAST, LEAST_RETURNS = 1024, 64, 4  # touches of a group in the sample, and how many (and returns) there must be for a fit
EVERY = 128  # requests between two fits
STEPS = 8  # of expectation maximisation; each fit starts from the one before
KS_LIMIT, KS_NOISE = 0.12, 1.1  # a distance may be that much above what a sample of n returns shows by chance, about 1.1 / sqrt(n)


class Fits(NamedTuple):
    """`group` int32[requests] · float64[fits, groups + 1], the last group for all together: `reused` (q, 0 to 1), `rate_s` (1/s) and
    `distance` (Kolmogorov-Smirnov, less what chance explains), NaN where the sample is too small · `touches` int64 likewise, of the sample
    in the `EVERY` requests before. Fit k is for requests from k * EVERY on, made of what came before."""

    group: I32
    reused: F64
    rate_s: F64
    distance: F64
    touches: I64

    @property
    def groups(self) -> int:
        """Number of categories."""
        return self.reused.shape[1] - 1


def categories(trace: Trace) -> tuple[I32, int]:
    """Group of each request, numbered from 0, and how many there are; types beyond the most frequent share one."""
    known, counts = np.unique(trace.category, return_counts=True)
    rank = {int(code): min(place, TYPES - 1) for place, code in enumerate(known[np.argsort(-counts, kind="stable")])}
    kind = np.array([rank[int(code)] for code in trace.category], np.int64)
    turn = np.array([0, 1, 2, 3, 4, *[5] * 4, *[6] * 8, 7], np.int64)[np.clip(trace.turn, 0, 17)]
    found, group = np.unique(kind * TURNS + turn, return_inverse=True)
    return group.astype(np.int32), found.size


def fit_trace(trace: Trace) -> Fits:
    """Fits for every `EVERY` requests. Cost: O(blocks) and some 10 us a group and fit."""
    group, groups = categories(trace) if trace.category.size else (np.zeros(0, np.int32), 1)
    fits = trace.category.size // EVERY + 1
    shape = (fits, groups + 1)
    out = Fits(group, np.full(shape, np.nan), np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, np.int64))
    share = min(1.0, trace.category.size / max(trace.ids.size, 1))
    _fit_all(trace, out, np.uint64(math.floor(share * (2**32 - 1))))
    return out


@nb.njit(cache=True, nogil=True)
def _fit_all(trace: Trace, out: Fits, threshold: np.uint64) -> None:
    groups = out.reused.shape[1]
    began = np.zeros((groups, SAMPLE), np.int64)
    gap = np.full((groups, SAMPLE), -1, np.int64)
    owner = np.full((groups, SAMPLE), -1, np.int64)
    seen = np.zeros(groups, np.int64)
    slot = np.full((trace.parent.size, 2), -1, np.int64)
    for request in range(out.group.size):
        now = trace.ts_us[request]
        fit = request // EVERY
        if request % EVERY == 0 and request:
            for g in range(groups):
                _fit(began[g], gap[g], min(seen[g], SAMPLE), now, fit, g, out)
        for i in range(trace.offsets[request], trace.offsets[request + 1]):
            key = trace.ids[i]
            if (np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32) > threshold:
                continue
            for both in range(2):
                g = groups - 1 if both else out.group[request]
                last = slot[key, both]
                if last >= 0 and owner[last // SAMPLE, last % SAMPLE] == key:
                    gap[last // SAMPLE, last % SAMPLE] = now - began[last // SAMPLE, last % SAMPLE]
                    owner[last // SAMPLE, last % SAMPLE] = -1
                at = seen[g] % SAMPLE
                began[g, at], gap[g, at], owner[g, at] = now, -1, key
                slot[key, both] = g * SAMPLE + at
                seen[g] += 1
                if fit + 1 < out.touches.shape[0]:
                    out.touches[fit + 1, g] += 1


@nb.njit(cache=True, nogil=True)
def _fit(began: I64, gap: I64, n: int, now: int, fit: int, g: int, out: Fits) -> None:
    """One group's fit and its distance, started from the fit before."""
    returned, total_s = 0, 0.0
    for i in range(n):
        if gap[i] >= 0:
            returned += 1
            total_s += gap[i] / 1e6
    if n < LEAST or returned < LEAST_RETURNS or total_s <= 0.0:
        return
    q, rate = out.reused[fit - 1, g], out.rate_s[fit - 1, g]
    if np.isnan(q):
        q, rate = returned / n, returned / total_s
    for _ in range(STEPS):
        more, more_s = 0.0, 0.0
        for i in range(n):
            if gap[i] < 0:
                waited_s = (now - began[i]) / 1e6
                still = q * np.exp(-rate * waited_s)
                still = still / (1.0 - q + still) if still > 0.0 else 0.0
                more += still
                more_s += still * (waited_s + 1.0 / rate)
        q = min((returned + more) / n, 1.0)
        rate = (returned + more) / (total_s + more_s)
    out.reused[fit, g], out.rate_s[fit, g] = q, rate
    out.distance[fit, g] = ks_distance(began, gap, n, now, q, rate) - KS_NOISE / np.sqrt(returned)


@nb.njit(cache=True, nogil=True)
def ks_distance(began: I64, gap: I64, n: int, now: int, q: float, rate_s: float) -> float:
    """Greatest difference between fitted and observed share of touches that came back by a time, over q.

    Observed is Kaplan and Meier's estimate, which counts touches that have not come back as long as they were watched.
    """
    time = np.empty(n, np.int64)
    for i in range(n):
        time[i] = gap[i] if gap[i] >= 0 else now - began[i]
    order = np.argsort(time)
    alive, worst = 1.0, 0.0
    for place in range(n):
        i = order[place]
        if gap[i] >= 0:
            fitted = q * (1.0 - np.exp(-rate_s * time[i] / 1e6))
            worst = max(worst, abs(1.0 - alive - fitted))
            alive *= 1.0 - 1.0 / (n - place)
            worst = max(worst, abs(1.0 - alive - fitted))
    return worst / q
