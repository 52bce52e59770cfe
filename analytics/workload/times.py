"""When blocks come back: reuse times, their exponential fits by category, how long blocks live, and how arrivals bunch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.workload.labels import LabelledChains, Touches
from analytics.workload.measures import quantiles, ratio

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

HISTOGRAM_EDGES_S = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0, float("inf"))
WINDOWS_S = (1, 10, 60)
SERIES_SLICES = 60
MIN_WINDOWS = 10
MAX_CATEGORIES = 40
LAST_TURN = 5


def reuse_ages(trace: LabelledChains) -> tuple[F64, I64]:
    """Seconds since the last touch (float64[k]) of every reused stretch and its blocks (int64[k])."""
    used, ts = trace.links.reused, trace.chains.ts_us
    return (ts[used.request] - ts[used.source]) / 1e6, used.length.astype(np.int64)


def reuse_times(trace: LabelledChains) -> dict[str, Any]:
    """Time from a block's touch to its next one: quantiles over reused references, and a histogram."""
    ages, blocks = reuse_ages(trace)
    p50, p80, p90 = quantiles(ages, (0.5, 0.8, 0.9), blocks)
    total = int(blocks.sum())
    counts = np.histogram(ages, HISTOGRAM_EDGES_S, weights=blocks)[0] if total else np.zeros(len(HISTOGRAM_EDGES_S) - 1)
    bins = [
        {"label": f"{lo:g}-{hi:g} s" if np.isfinite(hi) else f"over {lo:g} s", "from_s": lo, "reuses_ratio": ratio(count, total)}
        for lo, hi, count in zip(HISTOGRAM_EDGES_S, HISTOGRAM_EDGES_S[1:], counts.tolist(), strict=False)
    ]
    return {"p50_s": p50, "p80_s": p80, "p90_s": p90, "mean_s": ratio(float(ages @ blocks), total), "histogram": bins}


def categories(trace: LabelledChains) -> list[dict[str, Any]]:
    """By the category (type and turn) of the request that touched a block last: how likely it comes back, and after how long.

    `reuse_ratio` is the part of the touched blocks that were touched again before the trace ended. The fit is exponential with the mean as
    its maximum-likelihood estimate, weighted by blocks; `ks_distance_ratio` is the Kolmogorov-Smirnov distance of the reuse times from it.
    The largest 40 categories, by blocks. Source: the workload-aware policy of KVCache in the Wild (ATC'25).
    """
    label, names = category_codes(trace)
    used = trace.links.reused
    ages, blocks = reuse_ages(trace)
    touched = np.bincount(label, trace.lengths, minlength=len(names)).astype(np.int64)
    of = label[used.source]
    rows = []
    for code in np.argsort(-touched, kind="stable")[:MAX_CATEGORIES].tolist():
        mine = of == code
        own, weight = ages[mine], blocks[mine]
        reused = int(weight.sum())
        p50, p80, p90 = quantiles(own, (0.5, 0.8, 0.9), weight)
        mean, distance = exponential_fit(own, weight)
        rows.append(
            {
                "label": names[code],
                "requests": int((label == code).sum()),
                "blocks": int(touched[code]),
                "reuse_ratio": ratio(reused, int(touched[code])),
                "p50_s": p50,
                "p80_s": p80,
                "p90_s": p90,
                "exponential_mean_s": mean,
                "ks_distance_ratio": distance,
            }
        )
    return rows


def category_codes(trace: LabelledChains) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Code of each request's category and the names: type/turn, the turn counted up to `5+`; `?` for what is unknown."""
    turn = np.minimum(trace.turn, LAST_TURN)
    pairs, codes = np.unique(np.stack([trace.category, turn]), axis=1, return_inverse=True)
    types = [trace.categories[c] if c >= 0 else "?" for c in pairs[0].tolist()]
    turns = ["?" if t == 0 else f"{t}+" if t == LAST_TURN else str(t) for t in pairs[1].tolist()]
    return codes.reshape(-1).astype(np.int32), [f"{kind}/{t}" for kind, t in zip(types, turns, strict=True)]


def exponential_fit(values: F64, weights: npt.NDArray[Any]) -> tuple[float | None, float | None]:
    """Mean of the exponential distribution that fits best, and the Kolmogorov-Smirnov distance from it; None for nothing.

    The distance is the largest gap between the weighted empirical distribution and 1 - exp(-t/mean), at both sides of every step.
    """
    total = float(weights.sum())
    if not total:
        return None, None
    mean = float(values @ weights) / total
    if mean <= 0:
        return mean, None
    points, inverse = np.unique(values, return_inverse=True)
    upper = np.cumsum(np.bincount(inverse, weights)) / total
    lower = np.concatenate([[0.0], upper[:-1]])
    model = -np.expm1(-points / mean)
    return mean, float(np.maximum(np.abs(upper - model), np.abs(model - lower)).max())


def lifespans(touched: Touches) -> dict[str, Any]:
    """Time from the first to the last touch, over all distinct blocks (0 for those touched once) and over the reused ones."""
    seconds = touched.life_us / 1e6
    found: dict[str, Any] = {}
    for name, values in (("all", seconds), ("reused", seconds[touched.requests > 1])):
        for share, value in zip((50, 90, 99), quantiles(values, (0.5, 0.9, 0.99)), strict=True):
            found[f"{name}_p{share}_s"] = value
    found["max_s"] = float(seconds.max()) if seconds.size else None
    return found


def arrivals(ts_us: I64) -> tuple[dict[str, Any], dict[str, str]]:
    """How requests bunch, and reasons for what the times cannot tell.

    `ts_us` int64[n], rising. The index of dispersion is variance / mean of the requests in whole windows of 1, 10 and 60 s (1 for a Poisson
    process), peak / mean is over the same windows; the coefficient of variation is that of the gaps. Source: BurstGPT (KDD'25).
    """
    found: dict[str, Any] = {"requests": int(ts_us.size), "span_s": None, "rate_per_s": None, "gap_cv": None, "series": []}
    for size in WINDOWS_S:
        found[f"dispersion_{size}s"] = found[f"peak_to_mean_{size}s"] = None
    gaps = np.diff(ts_us)
    if not gaps.size or not gaps.sum():
        return found, {"arrivals": "fewer than two moments of arrival"}
    span_s = float(gaps.sum()) / 1e6
    found |= {"span_s": span_s, "rate_per_s": gaps.size / span_s, "series": _series(ts_us)}
    tick_s = _tick_s(gaps)
    why: dict[str, str] = {}
    mean_gap_s = span_s / gaps.size
    if tick_s > mean_gap_s:
        why["arrivals.gap_cv"] = f"times come in steps of {tick_s:g} s, longer than the mean gap"
    else:
        found["gap_cv"] = float(gaps.std() / gaps.mean())
    for size in WINDOWS_S:
        windows = int(span_s // size)
        if tick_s > size or windows < MIN_WINDOWS:
            reason = f"times come in steps of {tick_s:g} s" if tick_s > size else f"fewer than {MIN_WINDOWS} windows of {size} s"
            why[f"arrivals.dispersion_{size}s"] = why[f"arrivals.peak_to_mean_{size}s"] = reason
            continue
        at = (ts_us - ts_us[0]) // (size * 1_000_000)
        counts = np.bincount(at[at < windows], minlength=windows)
        found[f"dispersion_{size}s"] = float(counts.var() / counts.mean())
        found[f"peak_to_mean_{size}s"] = float(counts.max() / counts.mean())
    return found, why


def _tick_s(gaps: I64) -> float:
    """Step of the clock: where most requests share the stamp of the one before, the usual step to the next stamp; else the finest one."""
    steps = gaps[gaps > 0]
    return float(np.median(steps) if 2 * steps.size < gaps.size else np.gcd.reduce(steps)) / 1e6


def _series(ts_us: I64) -> list[dict[str, Any]]:
    """Requests in 60 equal slices of the span."""
    edges = np.linspace(ts_us[0], ts_us[-1], SERIES_SLICES + 1)
    counts = np.histogram(ts_us, edges)[0]
    return [
        {"label": f"slice {k + 1}", "from_s": float(edges[k] - ts_us[0]) / 1e6, "requests": int(counts[k])} for k in range(SERIES_SLICES)
    ]
