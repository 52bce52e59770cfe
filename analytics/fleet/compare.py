"""One load, several routers: what each would have given. The exact form of a route recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analytics.fleet.emulator import Fleet, FleetConfig
from analytics.fleet.faults import Fault
from analytics.fleet.result import FleetResult
from analytics.fleet.routers import RouterSpec
from analytics.fleet.workload import Workload


@dataclass(frozen=True)
class RouterRow:
    """Outcome of one router: token hit ratio, seconds to first token (mean, median, 99th percentile) and failed requests."""

    router: RouterSpec
    requests: int
    failed: int
    hit_ratio: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    prefill_s: float


def router_row(router: RouterSpec, result: FleetResult, from_s: float = 0.0) -> RouterRow:
    """Sums of one run over the requests that were looked up from `from_s` on; times are NaN if none was served."""
    mask = result.between(from_s)
    ttft_s = result.ttft_us[mask & (result.ttft_us >= 0)] / 1e6
    mean, p50, p99 = (ttft_s.mean(), *np.quantile(ttft_s, [0.5, 0.99])) if len(ttft_s) else (np.nan,) * 3
    return RouterRow(
        router,
        requests=int(mask.sum()),
        failed=int((mask & (result.ttft_us < 0)).sum()),
        hit_ratio=result.hit_ratio(from_s),
        ttft_mean_s=float(mean),
        ttft_p50_s=float(p50),
        ttft_p99_s=float(p99),
        prefill_s=float(result.prefill_us[mask].sum()) / 1e6,
    )


def compare_routers(
    workload: Workload,
    config: FleetConfig,
    routers: Sequence[RouterSpec],
    *,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    from_s: float = 0.0,
) -> list[RouterRow]:
    """Replay a load through the same fleet once per router; rows in the order given.

    `from_s` leaves the warm-up out of the sums. Truth is not worked out. Cost: one emulation a router.
    """
    rows = []
    for router in routers:
        result = Fleet(config, workload, router, faults, seed, with_truth=False).run_all()
        rows.append(router_row(router, result, from_s))
    return rows
