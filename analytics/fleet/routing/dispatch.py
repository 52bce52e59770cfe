"""One kernel that calls any router by number, so that an engine compiles once for all of them."""

from __future__ import annotations

from typing import Any

from numba import njit

from analytics.fleet.routing.learned import learn_ttft, lodestar
from analytics.fleet.routing.own import kvtide
from analytics.fleet.routing.rules import any_at_random, dynamo, least_load, llm_d, lmetric_prefill, mooncake, round_robin, weighted_sum
from analytics.fleet.routing.sticky import lmetric, pythia, session_sticky, smetric
from analytics.fleet.routing.trees import preble_e2, sglang_cache_aware

(WEIGHTED_SUM, SESSION_STICKY, LEAST_LOAD, RANDOM, ROUND_ROBIN, SGLANG, LLM_D, DYNAMO, PREBLE, MOONCAKE, LMETRIC, LMETRIC_PREFILL, SMETRIC,
 PYTHIA, LODESTAR, KVTIDE) = range(16)  # fmt: skip


@njit(cache=True, nogil=True)
def choose(code: Any, q: Any, v: Any, m: Any) -> Any:
    """Instance that router `code` chooses for request `q`; at least one instance must be up."""
    if code <= ROUND_ROBIN:
        if code == WEIGHTED_SUM:
            return weighted_sum(q, v, m)
        if code == SESSION_STICKY:
            return session_sticky(q, v, m)
        if code == LEAST_LOAD:
            return least_load(q, v, m)
        return any_at_random(q, v, m) if code == RANDOM else round_robin(q, v, m)
    if code <= PREBLE:
        if code == SGLANG:
            return sglang_cache_aware(q, v, m)
        if code == LLM_D:
            return llm_d(q, v, m)
        return dynamo(q, v, m) if code == DYNAMO else preble_e2(q, v, m)
    if code <= LMETRIC_PREFILL:
        if code == MOONCAKE:
            return mooncake(q, v, m)
        return lmetric(q, v, m) if code == LMETRIC else lmetric_prefill(q, v, m)
    if code <= PYTHIA:
        return smetric(q, v, m) if code == SMETRIC else pythia(q, v, m)
    return lodestar(q, v, m) if code == LODESTAR else kvtide(q, v, m)


@njit(cache=True, nogil=True)
def served(code: Any, r: Any, ttft_us: Any, m: Any) -> None:
    """Tell router `code` that request `r`, which it placed, had its first token after `ttft_us`."""
    if code == LODESTAR:
        learn_ttft(r, ttft_us, m)
