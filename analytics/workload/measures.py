"""Small measures that every theme needs: weighted quantiles, what the largest few carry, ratios that know when there is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None where there is no whole."""
    return float(part / whole) if whole else None


def quantiles(values: Numbers, shares: Sequence[float], weights: Numbers | None = None) -> list[float | None]:
    """Smallest value below or at which at least each share (0 to 1) of the weight lies; None where there is no weight.

    `values` and `weights` [n]; weights default to 1 each. Cost: one sort.
    """
    weights = np.ones(values.size, np.int64) if weights is None else weights
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    if not total.size or not total[-1]:
        return [None] * len(shares)
    at = np.searchsorted(total, np.asarray(shares) * total[-1] * (1 - 1e-12), side="left")
    return [float(values[order[i]]) for i in np.minimum(at, values.size - 1)]


def top_share(amounts: Numbers, share: float) -> float | None:
    """Part of the sum that the largest `share` of the entries carries, at least one entry; None where the sum is 0."""
    if not amounts.size:
        return None
    count = max(int(np.ceil(share * amounts.size)), 1)
    largest = np.partition(amounts, amounts.size - count)[-count:]
    return ratio(float(largest.sum()), float(amounts.sum()))


def fewest_share(amounts: Numbers, part: float) -> float | None:
    """Smallest share of the entries that together carry `part` of the sum; None where the sum is 0."""
    total = np.cumsum(np.sort(amounts)[::-1], dtype=np.float64)
    if not total.size or not total[-1]:
        return None
    return float(np.searchsorted(total, part * total[-1] * (1 - 1e-12), side="left") + 1) / amounts.size
