"""Random fleets for tests: a workload, a configuration, a router and faults, all drawn by hypothesis from a seed."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from analytics.fleet import faults
from analytics.fleet.emulator import Fleet, FleetConfig
from analytics.fleet.faults import Fault
from analytics.fleet.generator import TenantSpec, change_prompt_head, generate, scan
from analytics.fleet.routers import RouterSpec
from analytics.fleet.workload import Workload


@dataclass(frozen=True, repr=False)
class Case:
    """Everything a run needs; `fleet()` makes a fresh one, so that a case can be run twice."""

    config: FleetConfig
    workload: Workload
    router: RouterSpec
    faults: tuple[Fault, ...]

    def __repr__(self) -> str:
        return f"Case({self.config}, {len(self.workload)} requests, {self.router}, {self.faults})"

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(repr(self))  # type: ignore[attr-defined]

    def fleet(self, *, with_truth: bool = True) -> Fleet:
        return Fleet(self.config, self.workload, self.router, self.faults, with_truth=with_truth)


def small_workload(seed: int, *, minutes: float = 6.0, block_size: int = 16, rate: float = 1.5, tenants: int = 3) -> Workload:
    """A few hundred requests of a few tenants with short prompts."""
    specs = [
        TenantSpec(f"t{i}", 1.0 / (i + 1), heads=1 + i, head_blocks=3, turns=3.0, think_s=20.0, user_tokens=40.0, output_tokens=30.0,
                   max_prompt_tokens=1024)
        for i in range(tenants)
    ]  # fmt: skip
    return generate(specs, minutes=minutes, requests_per_s=rate, block_size=block_size, seed=seed)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seed = draw(st.integers(0, 10_000))
    instances = draw(st.integers(1, 4))
    workload = small_workload(seed, block_size=draw(st.sampled_from([8, 16])))
    if draw(st.booleans()):
        workload = (scan if draw(st.booleans()) else change_prompt_head)(workload, "t1", 120.0)
    config = FleetConfig(
        instances=instances,
        capacity_blocks=draw(st.sampled_from([60, 150, 400, 3000])),
        cost_a_s=draw(st.sampled_from([1e-4, 2e-3])),
        hold_s=draw(st.sampled_from([0.0, 0.5])),
        store_when=draw(st.sampled_from(["schedule", "finish"])),
        seed=seed,
    )
    struck = draw(st.lists(st.sampled_from(["restart", "remove", "add", "clear", "route", "capacity"]), max_size=4))
    return Case(config, workload, RouterSpec(draw(st.sampled_from(["weighted_sum", "session_affinity", "random"]))),
                tuple(_fault(draw, kind, instances) for kind in struck))  # fmt: skip


def _fault(draw: st.DrawFn, kind: str, instances: int) -> Fault:
    at_s = float(draw(st.integers(20, 330)))
    which = draw(st.integers(0, instances - 1))
    if kind == "restart":
        return faults.restart(at_s, which, down_s=float(draw(st.integers(1, 30))))
    if kind == "remove" and which > 0:  # a fleet keeps its first instance
        return faults.remove(at_s, which)
    if kind == "add":
        return faults.add(at_s)
    if kind == "clear":
        return faults.clear(at_s, which)
    if kind in ("route", "remove"):
        return faults.route(at_s, RouterSpec("random"))
    return faults.capacity(at_s, ratio=draw(st.sampled_from([0.3, 0.6, 1.5])))
