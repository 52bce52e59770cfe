"""The result of a run, per request, and the sums that matter: hit ratio, causes by share of prompt, contributions to a decline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from analytics.fleet.truth import CAPACITY_OTHER, CAUSES, HIT
from analytics.fleet.workload import Codes, Ints, Workload

SETTLE_S = 120.0  # what a decline needs to show itself in full
BASELINE_S = 900.0
WARM_S = 180.0  # caches start empty: what comes before says nothing


@dataclass(frozen=True)
class FleetResult:
    """Per request, by index in the workload: where it went, what it got, and the truth about what it missed.

    Times are microseconds of the emulation; `ttft_us` is -1 for failed requests, `outcome` indexes `chunks.OUTCOMES`. `tokens` is
    [requests, len(CAUSES)] and sums to the prompt; `cause_tenant` evicted most of its `capacity_other` blocks (-1: nobody).
    """

    workload: Workload
    looked_up_us: Ints
    instance: Ints
    hit_tokens: Ints
    queue_us: Ints
    prefill_us: Ints
    ttft_us: Ints
    outcome: Ints
    tokens: Ints
    cause_tenant: Codes

    def between(self, from_s: float = 0.0, to_s: float = float("inf"), tenant: str | None = None) -> npt.NDArray[np.bool_]:
        """Mask of the requests looked up in [from_s, to_s), of one tenant or of all."""
        seconds = self.looked_up_us / 1e6
        mask: npt.NDArray[np.bool_] = (seconds >= from_s) & (seconds < to_s)
        return mask if tenant is None else mask & (self.workload.tenant == self.workload.tenants.index(tenant))

    def hit_ratio(self, from_s: float = 0.0, to_s: float = float("inf"), tenant: str | None = None) -> float:
        """Hit tokens over prompt tokens; NaN without requests."""
        mask = self.between(from_s, to_s, tenant)
        prompt = int(self.workload.prompt_tokens[mask].sum())
        return float(self.hit_tokens[mask].sum()) / prompt if prompt else float("nan")

    def cause_shares(self, from_s: float = 0.0, to_s: float = float("inf"), tenant: str | None = None) -> dict[str, float]:
        """Part of the prompt tokens per cause, `hit` included; sums to 1. NaN without requests."""
        tokens = self.tokens[self.between(from_s, to_s, tenant)].sum(axis=0)
        total = int(tokens.sum())
        return {cause: float(tokens[k]) / total if total else float("nan") for k, cause in enumerate(CAUSES)}

    def interference(self, from_s: float = 0.0, to_s: float = float("inf")) -> dict[str, int]:
        """Tokens lost to other tenants' pressure, by the tenant that caused it (each request counted for its main evictor)."""
        mask = self.between(from_s, to_s) & (self.cause_tenant >= 0)
        lost = np.zeros(len(self.workload.tenants), np.int64)
        np.add.at(lost, self.cause_tenant[mask], self.tokens[mask, CAPACITY_OTHER])
        return dict(zip(self.workload.tenants, lost.tolist(), strict=True))


def contributions(result: FleetResult, onset_s: float, baseline_s: float = BASELINE_S, settle_s: float = SETTLE_S) -> dict[str, float]:
    """How many points of prompt share each cause gained from [onset - baseline, onset) to [onset + settle, end).

    They sum to the loss of hit ratio, which is minus the entry `hit`. Ratio points, 0.01 is one percentage point.
    """
    before = result.cause_shares(max(WARM_S, onset_s - baseline_s), onset_s)
    after = result.cause_shares(onset_s + settle_s)
    return {cause: after[cause] - before[cause] for cause in CAUSES}


def loss(moved: dict[str, float]) -> float:
    """Hit ratio lost, from `contributions`."""
    return -moved[CAUSES[HIT]]
