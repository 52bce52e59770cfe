"""Scenarios: an emulated fleet whose hit ratio falls for one known cause, while requests and tokens per minute stay flat.

`SCENARIOS` maps the name of the injected cause to a function of (seed, minutes); the fault sets in at half time. All load is synthetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from analytics.fleet import faults
from analytics.fleet.emulator import EPOCH_US, Fleet, FleetConfig
from analytics.fleet.faults import Fault
from analytics.fleet.generator import TenantSpec, change_prompt_head, generate, scan
from analytics.fleet.routers import RouterSpec
from analytics.fleet.workload import Workload

MINUTES = 40.0
_STICKY = RouterSpec("session_affinity")
_LOAD_ONLY = RouterSpec("weighted_sum", {"w": 0.0})

MIXED = (
    TenantSpec("chat", 0.25, heads=2, head_blocks=8, turns=6, think_s=45, user_tokens=120, output_tokens=250),
    TenantSpec("agent", 0.25, heads=1, head_blocks=20, turns=8, think_s=27, user_tokens=200, output_tokens=120),
    TenantSpec("rag", 0.15, heads=3, head_blocks=6, turns=3, think_s=45, user_tokens=700, output_tokens=150),
    TenantSpec("code", 0.15, heads=2, head_blocks=16, turns=6, think_s=45, user_tokens=300, output_tokens=200),
    TenantSpec("support", 0.10, heads=4, head_blocks=10, turns=4, think_s=60, user_tokens=100, output_tokens=200),
    TenantSpec("batch", 0.10, heads=4, head_blocks=24, turns=2, think_s=22, user_tokens=500, output_tokens=200),
)
# Long sessions of small steps at regular intervals (tool loops): an LRU that holds them by a small margin loses them all at once.
LOOPS = (
    TenantSpec("chat", 0.24, heads=2, head_blocks=4, turns=20, think_s=90, think_shape=8, user_tokens=45, output_tokens=70),
    TenantSpec("agent", 0.20, heads=1, head_blocks=12, turns=20, think_s=90, think_shape=8, user_tokens=70, output_tokens=40),
    TenantSpec("code", 0.20, heads=2, head_blocks=8, turns=20, think_s=90, think_shape=8, user_tokens=50, output_tokens=70),
    TenantSpec("support", 0.16, heads=4, head_blocks=6, turns=16, think_s=90, think_shape=8, user_tokens=50, output_tokens=70),
    TenantSpec("batch", 0.20, heads=2, head_blocks=8, turns=1, think_s=10, user_tokens=150, output_tokens=100),
)


@dataclass(frozen=True)
class Scenario:
    """A load, a fleet, and what is done to it at `onset_s`.

    `injected` is the true cause, one of the verdicts of docs/design.md section 6; `causes` are the causes (section 5) that it must show
    up as; `target` names the tenant or the part of the fleet that is behind it (empty: the whole fleet).
    """

    name: str
    workload: Workload
    config: FleetConfig
    router: RouterSpec
    faults: tuple[Fault, ...]
    injected: str
    causes: tuple[str, ...]
    onset_s: float
    description: str
    target: str = ""
    seed: int = 0

    def fleet(self, *, epoch_us: int = EPOCH_US, with_truth: bool = True) -> Fleet:
        """A fresh fleet, ready to run; equal on every call."""
        return Fleet(self.config, self.workload, self.router, self.faults, self.seed, epoch_us=epoch_us, with_truth=with_truth)


def _config(capacity_blocks: int, seed: int) -> FleetConfig:
    # Cost of a 70B-class model on one Prefill instance: about 5000 tokens/s on short prompts.
    return FleetConfig(capacity_blocks=capacity_blocks, cost_a_s=2e-4, cost_b_s=2e-8, seed=seed)


def mixed_load(seed: int, minutes: float = MINUTES, requests_per_s: float = 6.0, block_size: int = 64) -> Workload:
    """Six tenants with unlike habits: chat, agents, retrieval, code, support and batch. About 14,400 requests in 40 minutes."""
    return generate(MIXED, minutes=minutes, requests_per_s=requests_per_s, block_size=block_size, seed=seed, arrivals="paced")


def loop_load(seed: int, minutes: float = MINUTES, requests_per_s: float = 7.0, block_size: int = 64) -> Workload:
    """Four tenants with long, regular sessions and one with short independent requests. About 16,800 requests in 40 minutes."""
    return generate(LOOPS, minutes=minutes, requests_per_s=requests_per_s, block_size=block_size, seed=seed, arrivals="paced")


def _mixed(
    name: str,
    seed: int,
    minutes: float,
    description: str,
    *,
    schedule: tuple[Fault, ...] = (),
    load: Callable[[Workload, float], Workload] = lambda workload, onset_s: workload,
    causes: tuple[str, ...] = (),
    target: str = "",
) -> Scenario:
    onset_s = minutes * 30.0
    workload = load(mixed_load(seed, minutes), onset_s)
    config = _config(8000, seed)
    return Scenario(name, workload, config, _STICKY, schedule, name, causes, onset_s, description, target, seed)


def none(seed: int = 0, minutes: float = MINUTES) -> Scenario:
    """Nothing happens."""
    return _mixed("none", seed, minutes, "Nothing happens.")


def routing_migration(seed: int = 0, minutes: float = MINUTES) -> Scenario:
    """The gateway stops caring for caches: from session affinity to load only."""
    text = "The router goes from session affinity to load alone; sessions find their KV on another instance."
    schedule = (faults.route(minutes * 30.0, _LOAD_ONLY),)
    return _mixed("routing_migration", seed, minutes, text, schedule=schedule, causes=("routing",), target="router")


def instance_change(seed: int = 0, minutes: float = MINUTES, every_s: float = 40.0, down_s: float = 15.0) -> Scenario:
    """Rolling restarts that do not stop: one instance every `every_s` seconds, in turn."""
    onset_s = minutes * 30.0
    count = int((minutes * 60.0 - onset_s) / every_s)
    schedule = tuple(faults.restart(onset_s + k * every_s, k % 4, down_s) for k in range(count))
    text = f"Instances are restarted in turn, one every {every_s:g} s; each loses its KV."
    return _mixed("instance_change", seed, minutes, text, schedule=schedule, causes=("instance",), target="p0,p1,p2,p3")


def capacity_pressure(seed: int = 0, minutes: float = MINUTES, ratio: float = 0.2) -> Scenario:
    """Every instance is left with `ratio` of its KV capacity."""
    text = f"KV capacity of every instance falls to {ratio:.0%} of what it was."
    causes = ("capacity_self", "capacity_other", "capacity_resize")
    schedule = (faults.capacity(minutes * 30.0, ratio=ratio),)
    return _mixed("capacity_pressure", seed, minutes, text, schedule=schedule, causes=causes, target="fleet")


def tenant_reuse_shift(seed: int = 0, minutes: float = MINUTES, tenant: str = "agent") -> Scenario:
    """A large tenant puts a timestamp at the head of its prompts: nothing of its load can be reused any more."""
    text = f"Tenant {tenant} puts something that changes with every request at the head of its prompts."
    return _mixed(
        "tenant_reuse_shift",
        seed,
        minutes,
        text,
        load=lambda workload, onset_s: change_prompt_head(workload, tenant, onset_s),
        causes=("cold",),
        target=tenant,
    )


def noisy_neighbour(seed: int = 0, minutes: float = MINUTES, tenant: str = "batch", capacity_blocks: int = 4450) -> Scenario:
    """A small tenant starts to scan: its prompts are never asked for again and push its neighbours' sessions out."""
    onset_s = minutes * 30.0
    config = _config(capacity_blocks, seed)
    workload = scan(loop_load(seed, minutes), tenant, onset_s)
    text = f"Tenant {tenant} begins to scan: unique prompts, same number and length; its blocks evict the other tenants'."
    return Scenario("noisy_neighbour", workload, config, _STICKY, (), "noisy_neighbour", ("capacity_other",), onset_s, text, tenant, seed)


SCENARIOS: dict[str, Callable[..., Scenario]] = {
    "none": none,
    "routing_migration": routing_migration,
    "instance_change": instance_change,
    "capacity_pressure": capacity_pressure,
    "noisy_neighbour": noisy_neighbour,
    "tenant_reuse_shift": tenant_reuse_shift,
}
