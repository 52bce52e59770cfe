"""What a fleet is made of, and what a prefill costs on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class FleetConfig:
    """A fleet of equal instances.

    Prefilling tokens [s, e) costs `cost_a_s*(e-s) + cost_b_s*(e*e-s*s)/2` seconds. KV stays pinned for `hold_s` after the prefill, while
    it is transferred. `store_when` says when new blocks become visible to look-ups: at `schedule` (vLLM) or at the prefill's `finish`.
    """

    instances: int = 4
    capacity_blocks: int = 8192
    cost_a_s: float = 4e-5
    cost_b_s: float = 4e-9
    hold_s: float = 0.05
    store_when: Literal["schedule", "finish"] = "schedule"
    heartbeat_s: float = 10.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 1 or self.capacity_blocks < 1 or self.heartbeat_s <= 0:
            raise ValueError("a fleet needs an instance, a block of capacity and a positive heartbeat_s")
        if min(self.cost_a_s, self.cost_b_s, self.hold_s) < 0 or self.store_when not in ("schedule", "finish"):
            raise ValueError("costs and hold_s must not be negative; store_when is schedule or finish")


def prefill_us(cost_a_s: float, cost_b_s: float, start: int, end: int) -> int:
    """Microseconds to prefill tokens [start, end) of a prompt: docs/design.md section 1, prefill cost."""
    return round(1e6 * (cost_a_s * (end - start) + cost_b_s * (end * end - start * start) / 2.0))
