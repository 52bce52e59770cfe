"""Routers: which instance a request goes to. `ROUTERS` maps a name to its rule; adding one is a kernel, a number and a line.

The rules are kernels (`analytics/fleet/routing/`). The emulator calls one of them request by request through `Router`, the compiled
replay any of them by number. docs/routers.md compares them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from analytics.fleet.routing import dispatch, learned, own, rules, sticky, trees
from analytics.fleet.routing.memory import Memory, Needs, Sizes, grown, new_memory
from analytics.fleet.routing.view import RouteRequest as RouteRequest
from analytics.fleet.routing.view import View as View


@dataclass(frozen=True)
class Rule:
    """A router's kernel, its number in `routing/dispatch.py`, its parameters with defaults and what it has to remember."""

    code: int
    kernel: Callable[..., int]
    defaults: Mapping[str, float] = field(default_factory=dict)
    needs: Needs = Needs()

    @property
    def doc(self) -> str:
        """Rule and source."""
        return inspect.getdoc(getattr(self.kernel, "py_func", self.kernel)) or ""


_STICKY = Rule(dispatch.SESSION_STICKY, sticky.session_sticky, {"limit": 2.0}, Needs(homes=True))

ROUTERS: dict[str, Rule] = {
    "weighted_sum": Rule(dispatch.WEIGHTED_SUM, rules.weighted_sum, {"w": 0.7}),
    "session_affinity": replace(_STICKY, defaults={"limit": math.inf}),
    "session_sticky": _STICKY,
    "least_load": Rule(dispatch.LEAST_LOAD, rules.least_load),
    "random": Rule(dispatch.RANDOM, rules.any_at_random),
    "round_robin": Rule(dispatch.ROUND_ROBIN, rules.round_robin),
    "sglang_cache_aware": Rule(
        dispatch.SGLANG,
        trees.sglang_cache_aware,
        {"abs_threshold": 64.0, "rel_threshold": 1.5, "cache_threshold": 0.3, "max_tree_tokens": float(1 << 24)},
        Needs(trees=True),
    ),
    "llm_d": Rule(dispatch.LLM_D, rules.llm_d, {"queue": 2.0, "kv": 2.0, "prefix": 3.0}),
    "dynamo": Rule(dispatch.DYNAMO, rules.dynamo, {"prefill_load_scale": 1.0}),
    "preble_e2": Rule(dispatch.PREBLE, trees.preble_e2, {"window_s": 180.0, "rebalance": 1.5}, Needs(window=True)),
    "mooncake": Rule(dispatch.MOONCAKE, rules.mooncake),
    "lmetric": Rule(dispatch.LMETRIC, sticky.lmetric, {}, Needs(classes=True, window=True)),
    "lmetric_prefill": Rule(dispatch.LMETRIC_PREFILL, rules.lmetric_prefill),
    "smetric": Rule(dispatch.SMETRIC, sticky.smetric, {}, Needs(homes=True)),
    "pythia": Rule(dispatch.PYTHIA, sticky.pythia, {}, Needs(homes=True, classes=True, window=True)),
    "lodestar": Rule(dispatch.LODESTAR, learned.lodestar, {"explore": 0.1}, Needs(learner=True)),
    "kvtide": Rule(dispatch.KVTIDE, own.kvtide, {}, Needs(curves=True)),
}


@dataclass(frozen=True)
class RouterSpec:
    """A router by name and parameters: a value, so that a run can be repeated. Raises `ValueError` for an unknown name."""

    name: str
    params: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in ROUTERS:
            raise ValueError(f"unknown router {self.name!r}, have {', '.join(ROUTERS)}")

    @property
    def rule(self) -> Rule:
        return ROUTERS[self.name]

    def values(self) -> tuple[float, ...]:
        """Parameters in the kernel's order. Raises `ValueError` for one that the router does not have, or out of range."""
        defaults = self.rule.defaults
        unknown = set(self.params) - set(defaults)
        if unknown:
            raise ValueError(f"{self.name} has no parameter {', '.join(sorted(unknown))}, it has {', '.join(defaults) or 'none'}")
        values = {**defaults, **self.params}
        if not 0.0 <= values.get("w", 0.0) <= 1.0:
            raise ValueError("w must lie in 0..1")
        if any(math.isnan(value) or value < 0 for value in values.values()):
            raise ValueError("router parameters must not be negative")
        return tuple(float(value) for value in values.values())

    def memory(self, instances: int, seed: int, sizes: Sizes | None = None) -> Memory:
        """What the router starts with; its ties and draws depend on `seed` only."""
        return new_memory(instances, seed, self.values(), self.rule.needs, sizes or Sizes())

    def build(self, seed: int) -> Router:
        """A fresh router for calls request by request. Raises `ValueError` for wrong parameters."""
        return Router(self, seed)

    @property
    def label(self) -> str:
        """Name with parameters, as it stands in the events: `weighted_sum(w=0.7)`."""
        inside = ",".join(f"{name}={value:g}" for name, value in sorted(self.params.items()))
        return f"{self.name}({inside})" if inside else self.name


class Router:
    """One router at work. It learns the number of instances, sessions and blocks as requests come."""

    def __init__(self, spec: RouterSpec, seed: int) -> None:
        self._rule, self._spec, self._seed = spec.rule, spec, seed
        spec.values()
        self._sizes = Sizes()
        self._memory: Memory | None = None

    def choose(self, request: RouteRequest, view: View) -> int:
        """Index of an instance that is up; the caller makes sure that there is one."""
        if self._memory is None:
            self._memory = self._spec.memory(len(view.up), self._seed)
        needs = self._rule.needs
        highest = int(request.chain.max()) if len(request.chain) and (needs.trees or needs.curves) else -1
        sizes = Sizes(request.number + 1, max(request.session, request.head, request.tenant) + 1, highest + 1)
        if sizes != self._sizes:
            self._memory, self._sizes = grown(self._memory, needs, sizes), sizes
        return int(self._rule.kernel(request, view, self._memory))

    def served(self, number: int, ttft_us: int) -> None:
        """Request `number`, placed by this router or the one before it, had its first token after `ttft_us`."""
        if self._rule.needs.learner and self._memory is not None and number < len(self._memory.features):
            learned.learn_ttft(number, ttft_us, self._memory)

    def explain(self) -> list[dict[str, float]]:
        """Terms of the last decision for each instance, in seconds; empty for routers that do not add up seconds."""
        if self._spec.name != "kvtide" or self._memory is None:
            return []
        return [dict(zip(own.TERM_NAMES, row.tolist(), strict=False)) for row in self._memory.terms]


def describe(name: str) -> str:
    """First sentence of a router's rule. Raises `KeyError` for an unknown name."""
    text: Any = ROUTERS[name].doc
    return str(text.split("\n\n")[0])
