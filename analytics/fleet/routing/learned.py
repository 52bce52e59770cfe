"""A router that learns online what each placement would give."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from analytics.fleet.routing.memory import DRAWS, FEATURES, least
from analytics.fleet.routing.view import own_us, pinned_ratio, wait_us

USED = 7


@njit(cache=True, nogil=True)
def lodestar(q: Any, v: Any, m: Any) -> Any:
    """Least predicted TTFT, by ridge regression on a snapshot of each instance, optimistic where little is known (LinUCB).

    Snapshot: 1, wait, own prefill, requests waiting or running, pinned KV, prompt length, hit ratio. It learns from the TTFT of the
    requests that it placed. `explore` scales the optimism, in seconds a standard deviation. Built from the abstract (arXiv 2606.00946); the
    paper was not read.
    """
    if m.counters[DRAWS] == 0:
        m.counters[DRAWS] = 1
        for k in range(USED):
            m.model[k, k] = 1.0
    for i in range(m.score.size):
        x = m.terms[i]
        _snapshot(q, v, i, x)
        predicted, doubt = 0.0, 0.0
        for j in range(USED):
            predicted += m.model[FEATURES, j] * x[j]
            for k in range(USED):
                doubt += x[j] * m.model[j, k] * x[k]
        m.score[i] = predicted - m.params[0] * np.sqrt(max(doubt, 0.0))
    best = least(v, m)
    m.features[q.number] = m.terms[best]
    return best


@njit(cache=True, nogil=True)
def _snapshot(q: Any, v: Any, i: Any, x: Any) -> None:
    prompt = max(q.prompt_tokens, 1)
    x[0], x[1] = 1.0, wait_us(v, i, q.now_us) / 1e6
    x[2], x[3] = own_us(v, i, q.prompt_tokens) / 1e6, v.waiting[i] + v.running[i]
    x[4], x[5], x[6] = pinned_ratio(v, i), prompt / 8192.0, v.hit_blocks[i] * v.block_size / prompt


@njit(cache=True, nogil=True)
def learn_ttft(r: Any, ttft_us: Any, m: Any) -> None:
    """One more observation: the inverse of the ridge matrix by Sherman and Morrison, then the weights. Cost: O(USED^2)."""
    x, inverse, weights = m.features[r], m.model, m.model[FEATURES]
    gain = np.zeros(USED)
    for j in range(USED):
        for k in range(USED):
            gain[j] += inverse[j, k] * x[k]
    scale, error = 1.0, ttft_us / 1e6
    for j in range(USED):
        scale += x[j] * gain[j]
        error -= weights[j] * x[j]
    for j in range(USED):
        weights[j] += gain[j] * error / scale
        for k in range(USED):
            inverse[j, k] -= gain[j] * gain[k] / scale
