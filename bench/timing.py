"""Clocks of the benches: processor seconds, so that other processes on the machine weigh on neither side, with wall seconds beside them."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_LEAST_S = 1e-9  # a clock that did not move is no speed


@dataclass(frozen=True)
class Took:
    """Seconds of work: `cpu_s` of the processor, `user_s` of them outside the kernel (so without page faults), `wall_s` by the clock."""

    cpu_s: float = 0.0
    user_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Took) -> Took:
        return Took(self.cpu_s + other.cpu_s, self.user_s + other.user_s, self.wall_s + other.wall_s)

    def least(self, other: Took) -> Took:
        """The lesser of each."""
        return Took(min(self.cpu_s, other.cpu_s), min(self.user_s, other.user_s), min(self.wall_s, other.wall_s))

    def speed(self, blocks: int) -> dict[str, float]:
        """The seconds, and the blocks that the processor got through in one."""
        return {
            "blocks_per_second": blocks / self.cpu_s,
            "cpu_s": self.cpu_s,
            "user_s": self.user_s,
            "wall_s": self.wall_s,
        }


def took(work: Callable[[], T]) -> tuple[Took, T]:
    """Run `work` once under the clocks; the seconds and what it gave."""
    wall, cpu, user = time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_utime
    given = work()
    cpu_s, user_s = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
    return Took(max(cpu_s, _LEAST_S), max(user_s, _LEAST_S), time.perf_counter() - wall), given


def best_of(works: Mapping[str, Callable[[], object]], goes: Mapping[str, int]) -> dict[str, Took]:
    """The least seconds of each piece of work over its goes. The goes take turns, so that a slow spell hits all alike."""
    best: dict[str, Took] = {}
    for turn in range(max(goes.values())):
        for name, work in works.items():
            if turn < goes[name]:
                seconds, _ = took(work)
                best[name] = best.get(name, seconds).least(seconds)
    return best


def peak_rss_bytes() -> int:
    """Most resident memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rss_bytes() -> int:
    """Resident memory of this process now; its peak so far where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else peak_rss_bytes()


def machine() -> dict[str, Any]:
    """Load average (1, 5, 15 minutes) and number of processors: what else was going on."""
    return {"load_average": [round(load, 2) for load in os.getloadavg()], "processors": os.cpu_count()}
