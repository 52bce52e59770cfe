"""Replays for tests of the whole path: a public trace and a generated load, through an emulated fleet, as chunks of events."""

from __future__ import annotations

from pathlib import Path

import pytest

from analytics.fleet import faults
from analytics.fleet.chunks import Chunk
from analytics.fleet.config import FleetConfig
from analytics.fleet.emulator import Fleet
from analytics.fleet.routers import RouterSpec
from analytics.fleet.scenarios import mixed_load
from ingest.sources import read_trace
from kvtide.emulation import workload_from_trace

CONVERSATION = Path(__file__).parent.parent.parent / "shared" / "traces" / "mooncake" / "conversation_trace.jsonl.zst"
SEED = 20_250_101
STICKY = RouterSpec("session_affinity")


def conversation(limit: int | None = None) -> list[Chunk]:
    """Mooncake's conversation trace (its first `limit` requests) on four instances; tenants are assigned, since it has none."""
    if not CONVERSATION.is_file():
        pytest.skip(f"no {CONVERSATION}: the public traces are not beside this checkout")
    requests = read_trace([str(CONVERSATION)], "mooncake", assign_tenants="zipf:4", limit=limit)
    workload = workload_from_trace(requests, CONVERSATION.name)
    return list(Fleet(FleetConfig(instances=4, capacity_blocks=8192, seed=SEED), workload, STICKY, with_truth=False).run())


def generated(limit: int | None = None) -> list[Chunk]:
    """Twelve minutes of six synthetic tenants on a fleet to which everything happens: restart, clear, cut, route, add, remove."""
    schedule = (
        faults.restart(120.0, 1, down_s=15.0),
        faults.clear(200.0, 2),
        faults.capacity(280.0, ratio=0.3),
        faults.route(370.0, RouterSpec("weighted_sum", {"w": 0.5})),
        faults.add(430.0),
        faults.remove(550.0, 0),
    )
    config = FleetConfig(instances=4, capacity_blocks=8000, cost_a_s=2e-4, cost_b_s=2e-8, seed=SEED)
    return list(Fleet(config, mixed_load(SEED, 12.0), STICKY, schedule, with_truth=False).run())


def requests_of(chunks: list[Chunk]) -> int:
    """How many accesses the chunks hold."""
    return sum(len(chunk.access.ts_us) for chunk in chunks)
