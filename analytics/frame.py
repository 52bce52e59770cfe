"""What a diagnosis reads: one-minute windows of a fleet as plain arrays, with no store and no SQL behind them.

Axes: W windows (ascending, `width_s` long, empty minutes included as zeros), T tenants, I instances, K causes (`CAUSES`, `hit` first).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from analytics.causes import CAUSES
from analytics.pool import ReuseHistogram

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CAUSE_INDEX: dict[str, int] = {cause: index for index, cause in enumerate(CAUSES)}
REUSE_KINDS: tuple[str, ...] = ("reuse", "cold", "beyond")


class Span(NamedTuple):
    """Half-open stretch of event time, seconds since the epoch."""

    from_s: float
    to_s: float


@dataclass(frozen=True)
class ReuseTimes:
    """Placed reuse-time histograms of every window as parallel columns: one row is one bin of one (window, tenant, instance).

    `kind` indexes `REUSE_KINDS`; the bin is [from_ms, to_ms) and means nothing for cold and beyond.
    """

    window: Ints
    tenant: Ints
    instance: Ints
    kind: Ints
    from_ms: Floats
    to_ms: Floats
    blocks: Floats

    @classmethod
    def empty(cls) -> ReuseTimes:
        """No reuse times: a store whose shards sent none."""
        ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float64)
        return cls(ints, ints, ints, ints, floats, floats, floats)


@dataclass(frozen=True)
class FleetWindows:
    """Per window and instance [W, I]: load, timings (sums over the requests that carry them, with their count) and capacity.

    `capacity_blocks` is 0 where the instance was not up, `lost` counts its restarts, clears and removals. `engine_*_tokens` are the
    engines' own counters per window, NaN if not sent.
    """

    instances: tuple[str, ...]
    requests: Ints
    prompt_tokens: Ints
    hit_tokens: Ints
    miss_context: Floats
    hit_context: Floats
    queue_s: Floats
    queue_known: Ints
    prefill_s: Floats
    prefill_known: Ints
    ttft_s: Floats
    ttft_known: Ints
    capacity_blocks: Floats
    lost: Ints
    engine_query_tokens: Floats
    engine_hit_tokens: Floats

    @classmethod
    def build(cls, windows: int, instances: tuple[str, ...], given: Mapping[str, Any]) -> FleetWindows:
        """FleetWindows from the columns in `given` ([W, I] each); the others are zeros (NaN for the engine counters)."""
        shape = (windows, len(instances))
        columns: dict[str, Any] = {}
        for name, type_ in cls.__annotations__.items():
            if name == "instances":
                continue
            dtype = np.int64 if type_ == "Ints" else np.float64
            blank = np.full(shape, np.nan if name.startswith("engine") else 0, dtype)
            columns[name] = np.asarray(given.get(name, blank), dtype).reshape(shape)
        return cls(instances=instances, **columns)

    @property
    def up(self) -> NDArray[np.bool_]:
        """Which instances were up, [W, I]."""
        return self.capacity_blocks > 0


@dataclass(frozen=True)
class Frame:
    """Windows of one fleet. `tokens` [W, T, K] sums to the prompt tokens; `context` is its `token_context` (tokens times tokens before).

    `other_tokens` [W, T, T] splits capacity_other by whose allocation evicted (victim, culprit). `stored_blocks` [W, T] are first
    stores, `taken_blocks` [W, T] other tenants' blocks that this tenant's allocations evicted.
    """

    window_s: Floats
    tenants: tuple[str, ...]
    tokens: Ints
    context: Floats
    requests: Ints
    other_tokens: Ints
    stored_blocks: Ints
    taken_blocks: Ints
    fleet: FleetWindows
    reuse: ReuseTimes
    width_s: float = 60.0

    @property
    def windows(self) -> int:
        """Number of windows."""
        return int(self.window_s.size)

    @property
    def prompt_tokens(self) -> Ints:
        """Prompt tokens [W, T]."""
        return self.tokens.sum(axis=2)

    def hit_ratio(self) -> Floats:
        """Hit ratio of the fleet per window [W]; NaN where nothing was asked."""
        prompt = self.prompt_tokens.sum(axis=1).astype(np.float64)
        hit = self.tokens[:, :, 0].sum(axis=1)
        return np.divide(hit, prompt, out=np.full(self.windows, np.nan), where=prompt > 0)

    def mask(self, span: Span) -> NDArray[np.bool_]:
        """Windows that start inside `span`."""
        return (self.window_s >= span.from_s) & (self.window_s < span.to_s)

    def span(self, first: int, stop: int) -> Span:
        """Event time of windows first..stop-1."""
        return Span(float(self.window_s[first]), float(self.window_s[stop - 1] + self.width_s))

    def of_tenant(self, tenant: str) -> Frame:
        """The same windows with this tenant's requests only; reuse times and the fleet stay whole, since the pool is shared.

        Raises `KeyError` for a tenant that is not in the frame.
        """
        if tenant not in self.tenants:
            raise KeyError(tenant)
        keep = np.array([name == tenant for name in self.tenants])
        return replace(
            self,
            tokens=np.where(keep[None, :, None], self.tokens, 0),
            context=np.where(keep[None, :, None], self.context, 0.0),
            requests=np.where(keep[None, :], self.requests, 0),
            other_tokens=np.where(keep[None, :, None], self.other_tokens, 0),
        )

    def histograms(self, mask: NDArray[np.bool_], instance: str | None = None) -> list[ReuseHistogram]:
        """One reuse-time histogram per tenant over the masked windows, of one instance or summed over all."""
        duration_s = float(mask.sum() * self.width_s)
        rows = mask[self.reuse.window]
        if instance is not None:
            rows &= self.reuse.instance == self.fleet.instances.index(instance)
        return [self._histogram(rows & (self.reuse.tenant == index), duration_s) for index in range(len(self.tenants))]

    def _histogram(self, rows: NDArray[np.bool_], duration_s: float) -> ReuseHistogram:
        finite = rows & (self.reuse.kind == 0)
        edges = np.stack([self.reuse.from_ms[finite], self.reuse.to_ms[finite]], axis=1) / 1000.0
        bins, inverse = np.unique(edges, axis=0, return_inverse=True)
        blocks = np.bincount(inverse.ravel(), weights=self.reuse.blocks[finite], minlength=len(bins))
        cold = float(self.reuse.blocks[rows & (self.reuse.kind != 0)].sum())
        return ReuseHistogram(bins[:, 0], bins[:, 1], blocks.astype(np.float64), cold, duration_s)
