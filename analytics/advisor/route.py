"""Which router: read from a comparison of routers on the same requests in the fleet emulator."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from analytics.advisor.advice import Advice


class RouterOutcome(Protocol):
    """One router's outcome on the trace (`analytics.fleet.compare.RouterRow`): hit ratio (0 to 1), TTFT in s, failed requests."""

    @property
    def hit_ratio(self) -> float: ...
    @property
    def ttft_mean_s(self) -> float: ...
    @property
    def ttft_p50_s(self) -> float: ...
    @property
    def ttft_p99_s(self) -> float: ...
    @property
    def failed(self) -> int: ...


def advise_route(
    outcomes: Mapping[str, RouterOutcome],
    current: str,
    now_s: float,
    *,
    min_ttft_gain: float = 0.05,
    min_hit_gain: float = 0.01,
    horizon_s: float = 3600.0,
) -> Advice:
    """`route` to the router with the least mean TTFT, or `route_keep` if `current` is as good.

    A router is better if it saves `min_ttft_gain` of the mean TTFT without a worse p99 (5 % allowed), or, with TTFT equal within 5 %,
    brings `min_hit_gain` of hit ratio. `predicted` holds hit points gained and the TTFT ratios (new / current). The confidence grows with
    the margin; all rows come from one replay, so the interval is the range over the mean, median and p99.
    `outcomes` is by router label. A router that fails more requests than the current one is never better. Raises `ValueError` if
    `current` served nothing.
    """
    rows = {name: row for name, row in outcomes.items() if math.isfinite(row.ttft_mean_s)}
    if current not in rows:
        raise ValueError(f"the comparison has no served request with the current router {current!r}, only with {', '.join(rows) or 'none'}")
    now = rows[current]
    better = [name for name, row in rows.items() if name != current and _is_better(row, now, min_ttft_gain, min_hit_gain)]
    chosen = min(better, key=lambda name: (rows[name].ttft_mean_s, -rows[name].hit_ratio)) if better else current
    best = rows[chosen]
    ratios = [_ratio(best.ttft_mean_s, now.ttft_mean_s), _ratio(best.ttft_p50_s, now.ttft_p50_s), _ratio(best.ttft_p99_s, now.ttft_p99_s)]
    predicted = {
        "hit_ratio": best.hit_ratio,
        "hit_ratio_now": now.hit_ratio,
        "hit_points": 100.0 * (best.hit_ratio - now.hit_ratio),
        "ttft_mean_ratio": ratios[0],
        "ttft_p50_ratio": ratios[1],
        "ttft_p99_ratio": ratios[2],
        "ttft_mean_s": best.ttft_mean_s,
        "ttft_mean_s_now": now.ttft_mean_s,
        "ttft_p99_s": best.ttft_p99_s,
        "ttft_p99_s_now": now.ttft_p99_s,
    }
    margin = max(1.0 - ratios[0], best.hit_ratio - now.hit_ratio, 0.0)
    confidence = round(min(0.95, 0.6 + margin), 3) if better else round(_lead(rows, current), 3)
    interval = {"ttft_mean_ratio": (min(ratios), max(ratios))}
    verb = f"{chosen} instead of {current}" if better else f"No router beats {current}"
    change = f": TTFT times {ratios[0]:.2f} on average and {ratios[2]:.2f} at p99, hit ratio {predicted['hit_points']:+.1f} points."
    evidence = (
        verb + (change if better else "."),
        *(_sentence(name, rows[name], current) for name in sorted(rows, key=lambda name: rows[name].ttft_mean_s)),
    )
    return Advice("route" if better else "route_keep", chosen, predicted, interval, confidence, now_s + horizon_s, evidence)


def _is_better(row: RouterOutcome, now: RouterOutcome, min_ttft_gain: float, min_hit_gain: float) -> bool:
    if row.failed > now.failed:
        return False
    mean, tail = _ratio(row.ttft_mean_s, now.ttft_mean_s), _ratio(row.ttft_p99_s, now.ttft_p99_s)
    if mean <= 1.0 - min_ttft_gain and tail <= 1.05:
        return True
    return mean <= 1.05 and tail <= 1.05 and row.hit_ratio - now.hit_ratio >= min_hit_gain


def _ratio(new: float, old: float) -> float:
    return new / old if old > 0 else 1.0


def _lead(rows: Mapping[str, RouterOutcome], current: str) -> float:
    """Confidence in keeping: 0.6, more if the next router is clearly slower."""
    others = [row.ttft_mean_s for name, row in rows.items() if name != current]
    now = rows[current].ttft_mean_s
    return min(0.95, 0.6 + max(0.0, min(others) / now - 1.0)) if others and now > 0 else 0.6


def _sentence(name: str, row: RouterOutcome, current: str) -> str:
    mark = " (current)" if name == current else ""
    return f"{name}{mark}: hit {100 * row.hit_ratio:.1f} %, TTFT {row.ttft_mean_s:.2f} s mean, {row.ttft_p99_s:.2f} s p99."
