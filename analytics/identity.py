"""Where a change of the hit ratio comes from, as an identity with no remainder.

With tenant shares s, tenant hit ratios h and fleet ratio H of two sets of windows:
`dH = sum_t ds_t * (mean h_t - mean H) + sum_t mean s_t * dh_t` and `dh_t = -sum_cause d(miss share of t by cause)`.
Any additive weight serves: tokens, or prefill seconds `a*tokens + b*token_context`. Source: the symmetric (midpoint) form of the
Oaxaca-Blinder / Kitagawa decomposition; Shapley 1953 for the split between players that act together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import factorial

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Decomposition:
    """Change of a hit ratio (0 to 1) from `ratio_before` to `ratio_after`, split exactly: dH = mix.sum() + within.sum().

    `mix` [..., T] is the change of tenants' shares, `within` [..., T, K] that of each tenant's own ratio by cause (0 in the hit column);
    negative is a loss. Tenant shares and ratios are [..., T]. Leading axes are resamples, if any.
    """

    ratio_before: Floats
    ratio_after: Floats
    mix: Floats
    within: Floats
    share_before: Floats
    share_after: Floats
    tenant_before: Floats
    tenant_after: Floats

    @property
    def change(self) -> Floats:
        """dH."""
        return self.ratio_after - self.ratio_before

    def by_cause(self) -> Floats:
        """Contribution of every cause over all tenants [..., K]."""
        return self.within.sum(axis=-2)


def prefill_seconds(tokens: NDArray[np.int64], context: Floats, a_s: float, b_s: float) -> Floats:
    """Prefill cost of token counts with their `token_context`: `a*tokens + b*token_context`, seconds if a and b are."""
    return a_s * tokens + b_s * context


def decompose(before: NDArray[np.generic], after: NDArray[np.generic]) -> Decomposition:
    """Exact decomposition between two weight tables [..., T, K] with the hit in column 0.

    A tenant absent from one side changes the mix only: its ratio there is taken to be that of the other side. A side with nothing at
    all has no ratio and is taken to be the other side, so that the change is 0.
    Cost: O(size of the tables).
    """
    b, a = np.asarray(before, np.float64), np.asarray(after, np.float64)
    total_b, total_a = b.sum(axis=-1), a.sum(axis=-1)
    share_b, share_a = _divide(total_b, total_b.sum(axis=-1, keepdims=True)), _divide(total_a, total_a.sum(axis=-1, keepdims=True))
    empty_b, empty_a = (total.sum(axis=-1, keepdims=True) == 0 for total in (total_b, total_a))
    share_b, share_a = np.where(empty_b, share_a, share_b), np.where(empty_a, share_b, share_a)
    miss_b, miss_a = _divide(b, total_b[..., None]), _divide(a, total_a[..., None])
    only_after, only_before = (total_b == 0)[..., None], (total_a == 0)[..., None]
    miss_b, miss_a = np.where(only_after, miss_a, miss_b), np.where(only_before, miss_b, miss_a)
    tenant_b, tenant_a = miss_b[..., 0], miss_a[..., 0]
    ratio_b, ratio_a = (share_b * tenant_b).sum(axis=-1), (share_a * tenant_a).sum(axis=-1)
    middle = (ratio_b + ratio_a)[..., None] / 2.0
    mix = (share_a - share_b) * ((tenant_b + tenant_a) / 2.0 - middle)
    within = -((share_b + share_a) / 2.0)[..., None] * (miss_a - miss_b)
    within[..., 0] = 0.0
    return Decomposition(ratio_b, ratio_a, mix, within, share_b, share_a, tenant_b, tenant_a)


def shapley(players: int, value: Callable[[frozenset[int]], Floats]) -> Floats:
    """Shapley values [players, ...]: each player's mean marginal effect over all orders; their sum is value(all) - value(none).

    Cost: 2^players calls of `value`.
    """
    everyone = range(players)
    known = {frozenset(c): np.asarray(value(frozenset(c)), np.float64) for n in range(players + 1) for c in combinations(everyone, n)}
    parts = []
    for player in everyone:
        others = [p for p in everyone if p != player]
        part = np.zeros_like(known[frozenset()])
        for n in range(players):
            weight = factorial(n) * factorial(players - n - 1) / factorial(players)
            for subset in map(frozenset, combinations(others, n)):
                part = part + weight * (known[subset | {player}] - known[subset])
        parts.append(part)
    return np.stack(parts)


def scale_to(parts: Floats, observed: Floats, fallback: Floats) -> Floats:
    """Parts [players, ...] moved so that they sum to `observed` exactly: what is missing is spread in proportion to their sizes.

    Equals plain scaling when all parts have one sign, and stays bounded when they cancel. Where all parts are 0, `fallback`
    ([players, ...], summing to 1) divides the observed change.
    """
    size = np.abs(parts).sum(axis=0)
    weight = np.where(size > 1e-12, np.abs(parts) / np.where(size > 1e-12, size, 1.0), fallback)
    return np.where(size > 1e-12, parts, 0.0) + (observed - np.where(size > 1e-12, parts.sum(axis=0), 0.0)) * weight


def resample(windows: int, draws: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """How often each window counts in every draw [draws, windows], by a circular block bootstrap.

    Blocks of about windows^(1/3) keep neighbouring minutes together, so that autocorrelation widens the interval as it should.
    Source: Politis and Romano 1992.
    """
    length = max(1, round(windows ** (1.0 / 3.0)))
    starts = rng.integers(0, windows, size=(draws, -(-windows // length)))
    picks = ((starts[:, :, None] + np.arange(length)) % windows).reshape(draws, -1)[:, :windows]
    counts = np.zeros((draws, windows), np.int64)
    np.add.at(counts, (np.arange(draws)[:, None], picks), 1)
    return counts


def bootstrap(before: NDArray[np.generic], after: NDArray[np.generic], rng: np.random.Generator, draws: int = 400) -> Decomposition:
    """Decompositions of `draws` resamples of windows; `before` and `after` are weight tables per window [W, T, K].

    Cost: O(draws * windows * T * K) in two matrix products.
    """

    def drawn(tables: NDArray[np.generic]) -> Floats:
        counts = resample(tables.shape[0], draws, rng).astype(np.float64)
        flat = np.asarray(tables, np.float64).reshape(tables.shape[0], -1)
        return (counts @ flat).reshape(draws, *tables.shape[1:])

    return decompose(drawn(before), drawn(after))


def interval(draws: Floats, level: float = 0.95) -> tuple[float, float]:
    """Central interval of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _divide(top: Floats, bottom: Floats) -> Floats:
    return np.divide(top, bottom, out=np.zeros(np.broadcast_shapes(top.shape, bottom.shape)), where=bottom != 0)
