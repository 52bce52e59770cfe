"""Faults: what is done to an emulated fleet, and when. A schedule is a tuple of `Fault` values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from analytics.fleet.routers import RouterSpec

FaultKind = Literal["restart", "remove", "add", "clear", "route", "capacity"]


@dataclass(frozen=True)
class Fault:
    """One fault at `at_s` of event time; build it with the functions below.

    `instance` is an index, None for all. A capacity is given in blocks, or as a ratio of the configured one.
    """

    at_s: float
    kind: FaultKind
    instance: int | None = None
    down_s: float = 0.0
    router: RouterSpec | None = None
    blocks: int | None = None
    ratio: float | None = None

    @property
    def at_us(self) -> int:
        return round(self.at_s * 1e6)

    def capacity_of(self, configured_blocks: int) -> int:
        """Blocks that this fault sets, at least 1."""
        if self.blocks is not None:
            return self.blocks
        return max(1, round(configured_blocks * (1.0 if self.ratio is None else self.ratio)))


def restart(at_s: float, instance: int, down_s: float = 20.0) -> Fault:
    """The instance stops when its running prefill has ended, loses its KV and is up again `down_s` later."""
    return Fault(at_s, "restart", instance, down_s=down_s)


def remove(at_s: float, instance: int) -> Fault:
    """The instance stops when its running prefill has ended and does not come back."""
    return Fault(at_s, "remove", instance)


def add(at_s: float, blocks: int | None = None) -> Fault:
    """A new instance, cold, with `blocks` of capacity (the configured number if None)."""
    return Fault(at_s, "add", blocks=blocks)


def clear(at_s: float, instance: int) -> Fault:
    """The instance forgets its prefix cache and goes on (a `reset_prefix_cache` call)."""
    return Fault(at_s, "clear", instance)


def route(at_s: float, router: RouterSpec) -> Fault:
    """Another router, or other weights, from now on; it starts without memory."""
    return Fault(at_s, "route", router=router)


def capacity(at_s: float, instance: int | None = None, *, ratio: float | None = None, blocks: int | None = None) -> Fault:
    """Another capacity for one instance or for all of them (later ones too)."""
    return Fault(at_s, "capacity", instance, ratio=ratio, blocks=blocks)


@dataclass(frozen=True)
class Extent:
    """The most that a schedule can lead to: instances ever, and blocks of one of them."""

    instances: int
    slots: int


def extent(faults: Sequence[Fault], instances: int, capacity_blocks: int) -> Extent:
    """Check a schedule and size the arrays for it.

    Raises `ValueError` for a negative time, an instance that never exists, a capacity below 1, or a schedule that leaves no instance.
    """
    ever = instances + sum(fault.kind == "add" for fault in faults)
    slots = capacity_blocks
    for fault in faults:
        if fault.at_s < 0 or fault.down_s < 0:
            raise ValueError(f"{fault.kind}: negative time")
        if fault.instance is not None and not 0 <= fault.instance < ever:
            raise ValueError(f"{fault.kind}: no instance {fault.instance} in a fleet of {ever}")
        if fault.kind == "route" and fault.router is None:
            raise ValueError("route: no router given")
        if fault.kind in ("capacity", "add"):
            blocks = fault.capacity_of(capacity_blocks)
            if blocks < 1:
                raise ValueError(f"{fault.kind}: capacity must be at least 1 block")
            slots = max(slots, blocks)
    if len({fault.instance for fault in faults if fault.kind == "remove"}) >= ever:
        raise ValueError("the schedule removes every instance")
    return Extent(ever, slots)
