"""Facts beside the identity that name a culprit, and the sentences that a diagnosis shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from analytics.detectors import Load
from analytics.frame import CAUSE_INDEX, Floats, Frame
from analytics.identity import Decomposition
from analytics.pool import PoolChange

Mask = NDArray[np.bool_]

SHRUNK = -0.02
GROWTH = 1.25
LEAST_HARM = 0.003


@dataclass(frozen=True)
class Suspects:
    """Who could be behind a decline.

    `neighbour` is the tenant whose own change takes most capacity from the others ('' if nobody stands out or the fleet shrank), with
    `neighbour_growth` of its stored blocks per minute (ratio) and `neighbour_loss_points` of what it costs the others. `instance` names
    those that restarted or left. `capacity_change` is relative; `absent_share` of it (0 to 1) is instances that were gone rather than
    smaller. `engine_change_points` is dH by the engines' own counters, None if unknown.
    """

    neighbour: str
    neighbour_growth: float
    neighbour_loss_points: float
    instance: str
    lost: int
    capacity_change: float
    absent_share: float
    engine_change_points: float | None


def suspects(view: Frame, frame: Frame, before: Mask, after: Mask, pool: PoolChange | None) -> Suspects:
    """Suspects of the change between two sets of windows; `view` is the frame limited to the tenants whose loss is explained."""
    capacity, absent = _capacity(frame, before, after)
    neighbour, growth, loss = "", 0.0, 0.0
    if capacity > SHRUNK:
        harm = _modelled_harm(view, pool, before, after) if pool else _observed_harm(view, frame, before, after)
        culprit = int(np.argmax(harm))
        if harm[culprit] > LEAST_HARM and harm[culprit] >= 0.5 * np.clip(harm, 0, None).sum():
            neighbour, loss = frame.tenants[culprit], 100.0 * float(harm[culprit])
            growth = _growth(frame.stored_blocks, culprit, before, after)
    instance, lost = _instance(frame, before, after)
    return Suspects(neighbour, growth, loss, instance, lost, capacity, absent, _engine_change(view, frame, before, after))


def _modelled_harm(view: Frame, pool: PoolChange, before: Mask, after: Mask) -> Floats:
    """Hit ratio (0 to 1) that each tenant's change alone takes from the others, by the shared pool's counterfactuals.

    Who evicted whom does not tell: once the pool is too small, victims that come back evict each other.
    """
    influence = pool.influence()
    np.fill_diagonal(influence, 0.0)
    prompt = [view.prompt_tokens[mask].sum(axis=0) for mask in (before, after)]
    share = sum(side / max(float(side.sum()), 1.0) for side in prompt) / 2.0
    return np.asarray(influence @ share, np.float64)


def _observed_harm(view: Frame, frame: Frame, before: Mask, after: Mask) -> Floats:
    """The same from evictions, where there are no reuse times: only tenants whose stores or evictions of others grew by a quarter count."""
    loss = _other_share(view, after) - _other_share(view, before)
    grew = [
        max(_growth(blocks, tenant, before, after) for blocks in (frame.stored_blocks, frame.taken_blocks)) >= GROWTH
        for tenant in range(len(frame.tenants))
    ]
    return np.where(grew, loss, 0.0)


def _growth(blocks: NDArray[np.int64], tenant: int, before: Mask, after: Mask) -> float:
    """Blocks per minute after over before; inf from nothing."""
    old, new = float(blocks[before, tenant].mean()), float(blocks[after, tenant].mean())
    return new / old if old else (float("inf") if new else 1.0)


def _other_share(view: Frame, mask: Mask) -> Floats:
    """Share of the prompt tokens that each tenant's allocations cost the others, by culprit."""
    prompt = float(view.prompt_tokens[mask].sum())
    return view.other_tokens[mask].sum(axis=(0, 1)) / prompt if prompt else np.zeros(len(view.tenants))


def _capacity(frame: Frame, before: Mask, after: Mask) -> tuple[float, float]:
    blocks, up = frame.fleet.capacity_blocks, frame.fleet.up
    old, new = blocks[before].mean(axis=0), blocks[after].mean(axis=0)
    if not old.sum():
        return 0.0, 0.0
    loss = float(old.sum() - new.sum())
    size = np.divide(blocks[before].sum(axis=0), np.maximum(up[before].sum(axis=0), 1))
    gone = float((np.clip(up[before].mean(axis=0) - up[after].mean(axis=0), 0, None) * size).sum())
    return -loss / float(old.sum()), float(np.clip(gone / loss, 0, 1)) if loss > 0 else 0.0


def _instance(frame: Frame, before: Mask, after: Mask) -> tuple[str, int]:
    """Instances that lost their cache from the last baseline window on ('' if none did), and how often in all."""
    if not frame.fleet.instances:
        return "", 0
    last = np.zeros_like(before)
    last[np.flatnonzero(before)[-1] : np.flatnonzero(after)[-1] + 1] = True
    lost = frame.fleet.lost[last].sum(axis=0)
    return ",".join(name for name, count in zip(frame.fleet.instances, lost, strict=True) if count), int(lost.sum())


def _engine_change(view: Frame, frame: Frame, before: Mask, after: Mask) -> float | None:
    """dH in points by the engines' counters; None where they cover less than 80 % or more than 120 % of the events' prompt tokens."""
    if view is not frame:
        return None
    ratios = []
    for mask in (before, after):
        query = float(np.nansum(frame.fleet.engine_query_tokens[mask]))
        prompt = float(frame.fleet.prompt_tokens[mask].sum())
        if not prompt or not 0.8 <= query / prompt <= 1.2:
            return None
        ratios.append(float(np.nansum(frame.fleet.engine_hit_tokens[mask])) / query)
    return 100.0 * (ratios[1] - ratios[0])


def describe(
    verdict: str, tenants: tuple[str, ...], split: Decomposition, load: Load, contributions: Mapping[str, float], found: Suspects
) -> Iterator[str]:
    """Sentences with the figures that carry the verdict, the most important first."""
    before, after = 100 * float(split.ratio_before), 100 * float(split.ratio_after)
    yield f"Hit ratio {before:.1f} % -> {after:.1f} % ({after - before:+.1f} points)."
    state = "flat" if load.flat else "not flat"
    yield f"Load is {state}: requests {100 * load.requests:+.1f} %, prompt tokens {100 * load.prompt_tokens:+.1f} % per minute."
    losses = sorted((item for item in contributions.items() if item[1] < -0.05), key=lambda item: item[1])
    if losses:
        yield "Largest losses: " + ", ".join(f"{cause} {points:+.1f}" for cause, points in losses[:4]) + " points."
    if abs(found.capacity_change) > 0.005:
        yield f"Cache capacity of the fleet changed by {100 * found.capacity_change:+.1f} %."
    if found.instance:
        yield f"Cached state was lost {found.lost} times (restart, clear or removal) on {found.instance}."
    if found.neighbour:
        grew = "from nothing" if not np.isfinite(found.neighbour_growth) else f"{found.neighbour_growth:.1f} times"
        yield f"{found.neighbour}: stores grew {grew}; its change alone takes {found.neighbour_loss_points:.1f} points from the others."
    if verdict != "none":
        total = split.mix + split.within.sum(axis=-1)
        worst = int(np.argmin(total))
        yield f"{tenants[worst]} loses most: {100 * float(total[worst]):.1f} of the {after - before:+.1f} points."
    if verdict == "measurement" and found.engine_change_points is not None:
        yield f"The engines' own counters moved by {found.engine_change_points:+.1f} points only: check the event path first."
    elif found.engine_change_points is not None:
        yield f"The engines' own counters agree: {found.engine_change_points:+.1f} points."


def cause_series(frame: Frame) -> dict[str, Floats]:
    """Share of the prompt tokens by cause and window [W]; 0 in empty windows."""
    tokens = frame.tokens.sum(axis=1)
    total = np.maximum(tokens.sum(axis=1), 1)
    return {cause: tokens[:, index] / total for cause, index in CAUSE_INDEX.items()}
