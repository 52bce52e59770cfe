"""Routers: which instance a request goes to. `ROUTERS` maps a name to its class; adding one is a class and a line."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt


class RouteRequest(NamedTuple):
    """What a router may know of a request.

    `number` is its index in the workload; `session` and `head` (dense id of the first block) are -1 where unknown.
    """

    number: int
    tenant: int
    session: int
    prompt_tokens: int
    head: int


@dataclass(slots=True)
class View:
    """The fleet as a router sees it: arrays over instances, live (the emulator updates them in place).

    `queued_tokens` are prompt tokens that wait, `running_tokens` those of the prefill that runs (`running` is 0 or 1). `hit_blocks` is
    the request's leading run on each instance, filled in only for routers with `needs_hits`.
    """

    up: npt.NDArray[np.bool_]
    queued_tokens: npt.NDArray[np.int64]
    running_tokens: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    hit_blocks: npt.NDArray[np.int64]
    capacity_blocks: npt.NDArray[np.int64]
    block_size: int = 1

    @classmethod
    def idle(cls, instances: int, block_size: int) -> View:
        """A fleet of instances that are not up yet."""
        zeros = [np.zeros(instances, np.int64) for _ in range(5)]
        return cls(np.zeros(instances, bool), zeros[0], zeros[1], zeros[2], zeros[3], zeros[4], block_size)

    @property
    def load_tokens(self) -> npt.NDArray[np.int64]:
        """Prompt tokens placed on each instance and not yet prefilled."""
        return self.queued_tokens + self.running_tokens


class Router(Protocol):
    """`choose` returns the index of an instance that is up; the caller makes sure that there is one."""

    needs_hits: ClassVar[bool]

    def choose(self, request: RouteRequest, view: View) -> int: ...


class _LeastScore:
    """Least score wins; equals take turns, from a seeded start, so that an idle fleet fills evenly."""

    needs_hits: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        self._last = random.Random(seed).randrange(1 << 16)

    def _least(self, score: npt.NDArray[Any], up: npt.NDArray[np.bool_]) -> int:
        scores = score.tolist()
        lowest, n = float("inf"), len(scores)
        best = -1
        for step in range(1, n + 1):
            i = (self._last + step) % n
            if scores[i] < lowest and up[i]:
                lowest, best = scores[i], i
        self._last = best
        return best


class WeightedSum(_LeastScore):
    """Least `w * (1 - hit ratio) + (1 - w) * load / largest load`: the fixed weighted sum that most gateways use.

    `w` is the cache weight, 0 to 1: with 1 only hits count, with 0 only load. Raises `ValueError` for others.
    """

    needs_hits: ClassVar[bool] = True

    def __init__(self, seed: int = 0, w: float = 0.7) -> None:
        super().__init__(seed)
        if not 0.0 <= w <= 1.0:
            raise ValueError("w must lie in 0..1")
        self.w = w

    def choose(self, request: RouteRequest, view: View) -> int:
        load = view.load_tokens
        heaviest = int(load[view.up].max())
        score = (-self.w * view.block_size / max(request.prompt_tokens, 1)) * view.hit_blocks
        if heaviest:
            score = score + ((1.0 - self.w) / heaviest) * load
        return self._least(score, view.up)


class LeastLoad(_LeastScore):
    """The instance with the fewest prompt tokens waiting or running."""

    def choose(self, request: RouteRequest, view: View) -> int:
        return self._least(view.load_tokens, view.up)


class SessionAffinity(_LeastScore):
    """A session stays where its first request went (least load then); without a session, tenant and first block stand for one.

    A session whose instance is not up is placed anew and stays there.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self._home: dict[tuple[int, int], int] = {}

    def choose(self, request: RouteRequest, view: View) -> int:
        key = (-1, request.session) if request.session >= 0 else (request.tenant, request.head)
        home = self._home.get(key, -1)
        if home < 0 or not view.up[home]:
            home = self._least(view.load_tokens, view.up)
            self._home[key] = home
        return home


class Random:
    """Any instance that is up, all alike."""

    needs_hits: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def choose(self, request: RouteRequest, view: View) -> int:
        up = np.flatnonzero(view.up).tolist()
        return int(up[self._rng.randrange(len(up))])


class RoundRobin:
    """The instances that are up, in turn."""

    needs_hits: ClassVar[bool] = False

    def __init__(self, seed: int = 0) -> None:
        self._last = -1

    def choose(self, request: RouteRequest, view: View) -> int:
        up = np.flatnonzero(view.up).tolist()
        self._last = next((i for i in up if i > self._last), up[0])
        return self._last


ROUTERS: dict[str, type[WeightedSum] | type[LeastLoad] | type[SessionAffinity] | type[Random] | type[RoundRobin]] = {
    "weighted_sum": WeightedSum,
    "session_affinity": SessionAffinity,
    "least_load": LeastLoad,
    "random": Random,
    "round_robin": RoundRobin,
}


@dataclass(frozen=True)
class RouterSpec:
    """A router by name and parameters: a value, so that a run can be repeated. Raises `ValueError` for an unknown name."""

    name: str
    params: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ROUTERS:
            raise ValueError(f"unknown router {self.name!r}, have {', '.join(ROUTERS)}")

    def build(self, seed: int) -> Router:
        """A fresh router; its ties and draws depend on `seed` only."""
        return ROUTERS[self.name](seed=seed, **self.params)

    @property
    def label(self) -> str:
        """Name with parameters, as it stands in the events: `weighted_sum(w=0.7)`."""
        inside = ",".join(f"{name}={value:g}" for name, value in sorted(self.params.items()))
        return f"{self.name}({inside})" if inside else self.name
