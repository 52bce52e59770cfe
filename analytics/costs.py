"""The prefill cost model, fitted on what instances reported: `a*new_tokens + b*new_tokens*context_tokens` (docs/design.md section 1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Floats = NDArray[np.float64]


def token_context(start: NDArray[np.integer], end: NDArray[np.integer]) -> Floats:
    """Tokens [start, end) times the mean number of tokens before them: `(end^2 - start^2) / 2`; adds up over adjacent ranges."""
    first, last = start.astype(np.float64), end.astype(np.float64)
    return (last * last - first * first) / 2.0


def fit_prefill_cost(new_tokens: Floats, context: Floats, prefill_s: Floats) -> tuple[float, float]:
    """(a, b) in s/token and s/token^2 by least squares, neither negative, of `prefill_s` on new tokens and their `token_context`.

    Arrays of one value a request. Raises `ValueError` without a request that computed something. Cost: O(requests).
    """
    used = (new_tokens > 0) & np.isfinite(prefill_s)
    if not used.any():
        raise ValueError("no request with a prefill time: the cost of a token cannot be fitted")
    columns = np.stack([new_tokens[used], context[used]], axis=1)
    scale = columns.max(axis=0)
    (a, b), _ = nnls(columns / scale, prefill_s[used])
    return float(a / scale[0]), float(b / scale[1])
