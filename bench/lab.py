"""The lab's engines: the compiled fleet replay on a real trace, router included, beside the emulator and at growing length."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from analytics.fleet.emulator import Fleet
from analytics.fleet.lab import fleet_for
from analytics.fleet.replay import replay
from analytics.fleet.routers import ROUTERS, RouterSpec
from analytics.fleet.workload import Workload, concat
from bench import policies
from bench.timing import best_of, took
from ingest.errors import UsageError
from ingest.sources import read_trace
from kvtide.emulation import workload_from_trace

CONVERSATION = Path(__file__).parent.parent.parent / "shared" / "traces" / "mooncake" / "conversation_trace.jsonl.zst"
INSTANCES = 16


def run(trace: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """What each half of the lab gets through: `fleet_replay`, and under `policy_speed` the simulators of one cache beside libcachesim.

    `limit` requests of the trace, and as many accesses. Raises `UsageError` when the trace is not there or libcachesim is not installed.
    """
    return {**fleet_replay(trace, limit), "policy_speed": policies.run(None, limit)}


def fleet_replay(trace: str | None = None, limit: int | None = None, goes: int = 3) -> dict[str, Any]:
    """Requests per processor second of a 16-instance fleet replay, warm, look-ups on all instances and the router's decisions included.

    `trace` is a Mooncake file (the conversation trace unless named). Every router is measured from the workload to the outcome per request;
    `linear` holds the time of four traces in a row, each of new content, over four times that of one (1 is linear). `same_as_emulator`
    compares request by request with the event-driven emulator, and `ratio_emulator` the speeds. Raises `UsageError` without the trace.
    """
    path = Path(trace) if trace else CONVERSATION
    if not path.exists():
        raise UsageError(f"{path} is not there; name a Mooncake trace with --trace PATH")
    workload = workload_from_trace(read_trace(path, "mooncake", limit=limit), path.name)
    fleet = fleet_for(workload, INSTANCES)
    longer = repeated(workload, 4)
    for name in ROUTERS:
        replay(workload, fleet, RouterSpec(name))
    longer.blocks  # noqa: B018 - worked out once and kept, as for the single trace
    works = {name: partial(replay, workload, fleet, RouterSpec(name)) for name in ROUTERS}
    works["four in a row"] = partial(replay, longer, fleet, RouterSpec("weighted_sum"))
    best = best_of(works, dict.fromkeys(works, goes))
    seconds, slow = took(lambda: Fleet(fleet, workload, RouterSpec("kvtide"), with_truth=False).run_all())
    fast = replay(workload, fleet, RouterSpec("kvtide"))
    speeds = {name: len(workload) / best[name].cpu_s for name in ROUTERS}
    return {
        "trace": path.name,
        "requests": len(workload),
        "blocks": len(workload.hashes),
        "instances": INSTANCES,
        "requests_per_second": speeds,
        "least_requests_per_second": min(speeds.values()),
        "linear": best["four in a row"].cpu_s / (4 * best["weighted_sum"].cpu_s),
        "emulator_requests_per_second": len(workload) / seconds.cpu_s,
        "ratio_emulator": speeds["kvtide"] * seconds.cpu_s / len(workload),
        "same_as_emulator": all(np.array_equal(getattr(slow, k), getattr(fast, k)) for k in ("instance", "hit_tokens", "ttft_us")),
    }


def repeated(workload: Workload, times: int) -> Workload:
    """A load several times over, one after the other, each time with content of its own."""
    span = int(workload.arrived_at_us[-1]) + 1 if len(workload) else 0
    parts = [
        replace(workload, arrived_at_us=workload.arrived_at_us + k * span, hashes=workload.hashes ^ np.uint64(k << 56))
        for k in range(times)
    ]
    return concat(parts)
