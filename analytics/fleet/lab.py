"""The routers' lab: every router on every load, at a stated share of what the fleet could just bear, over seeds.

Saturation is defined by the best that affinity could do: `work` is the prefill time of the whole load when one cache with the capacity of
the whole fleet serves it, so that no block is held twice and no reuse is missed for want of routing. At load 0.8 the arrivals' clock is
scaled so that this work is 80 % of the fleet's time. A router that finds fewer hits has more work than that, and may be past saturation.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from analytics.fleet.config import FleetConfig
from analytics.fleet.replay import Replay, replay
from analytics.fleet.routers import RouterSpec
from analytics.fleet.workload import Ints, Workload, take

CAPACITY_SHARE = 0.2  # of the load's distinct blocks, held by the fleet as a whole
WARM_SHARE = 0.2  # of the requests, left out of the figures: caches start empty
JITTER_GAPS = 2.0  # standard deviation of an arrival's displacement, in mean gaps between arrivals


@dataclass(frozen=True)
class Cell:
    """One load, number of instances, share of saturation and seed."""

    workload: str
    instances: int
    load: float
    seed: int


def fleet_for(workload: Workload, instances: int, config: FleetConfig = FleetConfig(), share: float = CAPACITY_SHARE) -> FleetConfig:  # noqa: B008
    """A fleet that holds `share` of the load's distinct blocks in all, but on each instance at least two of its longest prompts."""
    longest = int(-(-workload.prompt_tokens.max(initial=1) // workload.block_size))
    each = max(int(share * len(workload.blocks.hashes) / instances), 2 * longest)
    return replace(config, instances=instances, capacity_blocks=each)


def saturation_factor(workload: Workload, config: FleetConfig) -> float:
    """Factor on the arrival rate at which one common cache of the fleet's whole capacity would keep all instances just busy."""
    common = replace(config, instances=1, capacity_blocks=config.capacity_blocks * config.instances)
    work_s = float(replay(workload, common, RouterSpec("round_robin")).prefill_us.sum()) / 1e6
    return config.instances * workload.span_s / work_s


def jittered(workload: Workload, seed: int, gaps: float = JITTER_GAPS) -> Workload:
    """The same requests, each displaced by a normal time of `gaps` mean gaps; a session's requests keep their order.

    Another draw of the same load: what a router gains on all of them is not luck with one order of arrivals. Deterministic for a seed.
    """
    rng = np.random.default_rng(seed)
    n = len(workload)
    moved = workload.arrived_at_us + rng.normal(0.0, gaps * workload.span_s * 1e6 / max(n, 1), n)
    at = _in_order(np.maximum(moved, 0.0).astype(np.int64), workload.session)
    order = np.argsort(at, kind="stable")
    timeless = replace(workload, arrived_at_us=np.zeros(n, np.int64))  # `take` keeps times, and these run backwards on the way
    return replace(take(timeless, order), arrived_at_us=at[order])


def _in_order(at_us: Ints, session: Any) -> Ints:
    """Running maximum of the times within each session."""
    latest: dict[int, int] = {}
    out = at_us.copy()
    for k, (s, at) in enumerate(zip(session.tolist(), at_us.tolist(), strict=True)):
        if s >= 0:
            latest[s] = out[k] = max(at, latest.get(s, 0))
    return out


def figures(result: Replay, warm: float = WARM_SHARE) -> dict[str, float]:
    """TTFT in s (mean, median, 99th percentile) and token hit ratio past the first `warm` of the requests, and how many failed."""
    first = int(warm * len(result.instance))
    ttft = result.ttft_us[first:]
    served = ttft[ttft >= 0] / 1e6
    prompt = int(result.workload.prompt_tokens[first:].sum())
    p50, p99 = np.quantile(served, [0.5, 0.99]) if len(served) else (np.nan, np.nan)
    return {
        "ttft_p50_s": float(p50),
        "ttft_p99_s": float(p99),
        "ttft_mean_s": float(served.mean()) if len(served) else float("nan"),
        "hit_ratio_tokens": float(result.hit_tokens[first:].sum()) / prompt if prompt else float("nan"),
        "failed": int((ttft < 0).sum()),
    }


BOUND = "bound(shared_kv)"


def shared_kv_bound(workload: Workload, config: FleetConfig) -> Replay:
    """What no router can have here: every instance reads the whole fleet's KV, and one queue feeds whichever is free first.

    Hits and prefill times are those of one cache with the capacity of the fleet, asked in order of arrival (cut by a longer queue only, in
    which an order of service is an order of arrival). Not a proven bound: a router may hold other blocks than one LRU of the whole would.
    """
    common = replace(config, instances=1, capacity_blocks=config.capacity_blocks * config.instances)
    shared = replay(workload, common, RouterSpec("round_robin"))
    free = [0] * config.instances
    queue = np.zeros(len(workload), np.int64)
    for k, (at, busy) in enumerate(zip(workload.arrived_at_us.tolist(), shared.prefill_us.tolist(), strict=True)):
        begin = max(at, free[0])
        queue[k] = begin - at
        heapq.heapreplace(free, begin + busy)
    return replace(shared, queue_us=queue, ttft_us=np.where(shared.failed, -1, queue + shared.prefill_us))


def cells(workloads: Iterable[str], instances: Sequence[int], loads: Sequence[float], seeds: Sequence[int]) -> list[Cell]:
    """Every combination, one load's cells together."""
    return [Cell(name, n, load, seed) for name in workloads for n in instances for load in loads for seed in seeds]


def run_cell(
    cell: Cell, workload: Workload, routers: Sequence[RouterSpec], config: FleetConfig | None = None, bound: bool = False
) -> list[dict[str, Any]]:
    """One row a router. `workload` is the load as read; jitter, time scale and fleet follow from the cell."""
    fleet = fleet_for(workload, cell.instances, config or FleetConfig())
    factor = cell.load * saturation_factor(workload, fleet)
    scaled = jittered(workload.scale_rate(factor), cell.seed)
    where = {"workload": cell.workload, "instances": cell.instances, "load": cell.load, "seed": cell.seed}
    rows = [{**where, "router": router.label, **figures(replay(scaled, fleet, router, seed=cell.seed))} for router in routers]
    return [*rows, {**where, "router": BOUND, **figures(shared_kv_bound(scaled, fleet))}] if bound else rows


def router_table(
    workloads: Mapping[str, Workload],
    routers: Sequence[RouterSpec | str],
    loads: Sequence[float] = (0.6, 0.8, 0.9),
    instances: Sequence[int] = (4, 8, 16),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    *,
    processes: int = 1,
    config: FleetConfig | None = None,
    bound: bool = False,
) -> Iterator[dict[str, Any]]:
    """Rows {workload, router, instances, load, seed, ttft_p50_s, ttft_p99_s, ttft_mean_s, hit_ratio_tokens, failed}, cell by cell.

    `routers` are specs or bare names. A seed sets the arrivals' jitter, the routers' ties and their draws. `config` gives costs and hold;
    its instances and capacity are replaced (see `fleet_for`). With `processes` above 1 cells run side by side; the rows and their order
    are the same. `bound` adds the row of `shared_kv_bound` to every cell. Raises `ValueError` for an unknown router. Cost: one replay a
    router and cell, and one more a cell.
    """
    specs = [RouterSpec(router) if isinstance(router, str) else router for router in routers]
    todo = cells(workloads, instances, loads, seeds)
    if processes <= 1:
        for cell in todo:
            yield from run_cell(cell, workloads[cell.workload], specs, config, bound)
        return
    with ProcessPoolExecutor(processes, initializer=_share, initargs=(dict(workloads), specs, config, bound)) as pool:
        for rows in pool.map(_run_shared, todo):
            yield from rows


_shared: dict[str, Any] = {}


def _share(workloads: dict[str, Workload], routers: list[RouterSpec], config: FleetConfig | None, bound: bool) -> None:
    _shared.update(workloads=workloads, routers=routers, config=config, bound=bound)


def _run_shared(cell: Cell) -> list[dict[str, Any]]:
    return run_cell(cell, _shared["workloads"][cell.workload], _shared["routers"], _shared["config"], _shared["bound"])
