"""Why the hit ratio fell: onset, exact contributions by cause and tenant, verdict with interval and evidence.

`diagnose` reads a `Frame` and returns a `Diagnosis`. Contributions are in percentage points of the hit ratio, negative for a loss, and
sum to its change exactly: one entry per cause plus `mix` (the shares of tenants moved). Verdicts group causes by what to do about them.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analytics.causes import CAUSES
from analytics.detectors import DETECTORS, Load, load_change
from analytics.evidence import Suspects, describe, suspects
from analytics.frame import CAUSE_INDEX, Floats, Frame, Span
from analytics.identity import Decomposition, bootstrap, decompose, interval, prefill_seconds, scale_to
from analytics.pool import PoolChange

VERDICTS: tuple[str, ...] = (
    "routing_migration",
    "instance_change",
    "capacity_pressure",
    "noisy_neighbour",
    "tenant_reuse_shift",
    "tenant_mix_shift",
    "prompt_shape",
    "measurement",
    "event_loss",
    "none",
)
# not_stored goes with capacity: an engine that does not keep what it computed had no free block to keep it in.
CAUSE_VERDICT: dict[str, str] = {
    "granularity": "prompt_shape",
    "unobserved": "event_loss",
    "routing": "routing_migration",
    "broken_prefix": "routing_migration",
    "in_flight": "routing_migration",
    "not_stored": "capacity_pressure",
    "instance": "instance_change",
    "cold": "tenant_reuse_shift",
    "beyond": "tenant_reuse_shift",
    "mix": "tenant_mix_shift",
}
CAPACITY_CAUSES: tuple[str, ...] = ("capacity_self", "capacity_other", "capacity_resize")
QUERIES: tuple[str, ...] = ("diagnosis_series", "diagnosis_causes", "diagnosis_turnover", "diagnosis_instances", "diagnosis_reuse_times")

WARM_UP_WINDOWS = 3
BASELINE_WINDOWS = 15
SETTLE_WINDOWS = 2
MIN_WINDOWS = 3
MIN_EFFECT = 0.01


@dataclass(frozen=True)
class Group:
    """One verdict's part in the change: points (negative: loss) with its 95 % interval, and what is behind it: a tenant,
    instances, `router`, `fleet` or `events`."""

    verdict: str
    points: float
    low: float
    high: float
    target: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"verdict": self.verdict, "points": self.points, "interval": [self.low, self.high], "target": self.target}


@dataclass(frozen=True)
class TenantChange:
    """One tenant's share of the prompt tokens and its hit ratio in both stretches, and its contributions in points of the fleet's ratio."""

    tenant: str
    share_before: float
    share_after: float
    hit_ratio_before: float
    hit_ratio_after: float
    contributions: dict[str, float]


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `contributions` (points, per cause and `mix`) sum to 100 * (hit_ratio_after - hit_ratio_before)."""

    verdict: str
    target: str
    tenant: str
    hit_ratio_before: float
    hit_ratio_after: float
    change_low: float
    change_high: float
    baseline: Span
    current: Span
    onset_s: float | None
    p_value: float | None
    load: Load
    contributions: dict[str, float]
    groups: tuple[Group, ...]
    tenants: tuple[TenantChange, ...]
    evidence: tuple[str, ...]
    prefill_contributions: dict[str, float] = field(default_factory=dict)
    queries: tuple[str, ...] = QUERIES

    @property
    def change_points(self) -> float:
        """Change of the hit ratio in percentage points."""
        return 100.0 * (self.hit_ratio_after - self.hit_ratio_before)

    def to_json(self) -> dict[str, Any]:
        """The whole diagnosis as plain values for JSON."""
        return {
            "verdict": self.verdict,
            "target": self.target,
            "tenant": self.tenant,
            "hit_ratio": {"before": self.hit_ratio_before, "after": self.hit_ratio_after},
            "change_points": self.change_points,
            "change_interval": [self.change_low, self.change_high],
            "baseline": list(self.baseline),
            "current": list(self.current),
            "onset_s": self.onset_s,
            "p_value": self.p_value,
            "load": {"requests": _finite(self.load.requests), "prompt_tokens": _finite(self.load.prompt_tokens), "flat": self.load.flat},
            "contributions": self.contributions,
            "groups": [group.to_json() for group in self.groups],
            "tenants": [vars(tenant) for tenant in self.tenants],
            "evidence": list(self.evidence),
            "prefill_contributions": self.prefill_contributions,
            "queries": [{"name": name, "from_s": self.baseline.from_s, "to_s": self.current.to_s} for name in self.queries],
        }

    def row(self, made_at_us: int) -> dict[str, Any]:
        """This diagnosis as a row of the `diagnosis` table; the id follows from its content and time."""
        evidence = json.dumps({key: value for key, value in self.to_json().items() if key not in ("contributions", "tenants")})
        identity = uuid.uuid5(uuid.NAMESPACE_OID, f"{made_at_us}:{self.tenant}:{evidence}")
        spans = {"baseline_from": self.baseline.from_s, "baseline_to": self.baseline.to_s}
        spans |= {"current_from": self.current.from_s, "current_to": self.current.to_s}
        return {
            "id": str(identity),
            "made_at_us": made_at_us,
            "tenant": self.tenant,
            **{name: int(value) for name, value in spans.items()},
            "verdict": self.verdict,
            "target": self.target,
            "hit_ratio_before": self.hit_ratio_before,
            "hit_ratio_after": self.hit_ratio_after,
            "contributions": self.contributions,
            "evidence": evidence,
        }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


@dataclass(frozen=True)
class _Stretches:
    """The two sets of windows, and the change that led to them (None if they were given)."""

    before: NDArray[np.bool_]
    after: NDArray[np.bool_]
    onset: int | None
    p_value: float | None
    significant: bool


def diagnose(
    frame: Frame,
    baseline: Span | None = None,
    current: Span | None = None,
    *,
    tenant: str | None = None,
    prefill_cost: tuple[float, float] | None = None,
    detector: str = "dip",
    seed: int = 0,
) -> Diagnosis:
    """Verdict on the decline in `frame`, or `none`.

    Without spans the onset is detected; the baseline is up to 15 minutes before it without the first 3 (warm-up), the current stretch
    starts 2 windows after the onset where the decline lasts long enough and ends where it recovers. With `current` alone, the baseline is
    up to 15 minutes before it. `tenant` limits the identity to one tenant. `prefill_cost` (a, b) adds contributions weighted by prefill
    seconds. A given pair of spans is a decline if its 95 % interval lies below 0 and the loss is 1 point or more.
    Raises `ValueError` if a span holds no traffic, `KeyError` for an unknown tenant.
    Cost: dominated by the detector's simulated nulls (below 0.2 s) and 400 resamples.
    """
    rng = np.random.default_rng(seed)
    view = frame if tenant is None else frame.of_tenant(tenant)
    stretches = _stretches(view, baseline, current, detector, rng)
    tokens = view.tokens
    split = decompose(tokens[stretches.before].sum(axis=0), tokens[stretches.after].sum(axis=0))
    draws = bootstrap(tokens[stretches.before], tokens[stretches.after], rng)
    pool = _pool_change(frame, stretches)
    players = pool.players() if pool else np.zeros((3, len(frame.tenants)))
    found = suspects(view, frame, stretches.before, stretches.after, pool)
    groups = _groups(view, split, draws, players, found)
    low, high = (100.0 * bound for bound in interval(draws.change))
    declined = stretches.significant and (stretches.onset is not None or (high < 0 and float(split.change) <= -MIN_EFFECT))
    verdict = _verdict(groups, found, 100.0 * float(split.change)) if declined else "none"
    target = next((group.target for group in groups if group.verdict == verdict), "")
    load = load_change(view.requests.sum(axis=1) * 1.0, view.prompt_tokens.sum(axis=1) * 1.0, stretches.before, stretches.after)
    spans = tuple(_span(view, mask) for mask in (stretches.before, stretches.after))
    contributions = _contributions(split)
    return Diagnosis(
        verdict=verdict,
        target=target,
        tenant=tenant or "",
        hit_ratio_before=float(split.ratio_before),
        hit_ratio_after=float(split.ratio_after),
        change_low=low,
        change_high=high,
        baseline=spans[0],
        current=spans[1],
        onset_s=None if stretches.onset is None else float(view.window_s[stretches.onset]),
        p_value=stretches.p_value,
        load=load,
        contributions=contributions,
        groups=groups,
        tenants=_tenants(view, split),
        evidence=tuple(describe(verdict, view.tenants, split, load, contributions, found)),
        prefill_contributions=_prefill(view, stretches, prefill_cost),
    )


def _stretches(frame: Frame, baseline: Span | None, current: Span | None, detector: str, rng: np.random.Generator) -> _Stretches:
    if current is not None:
        after = frame.mask(current)
        first = int(np.argmax(after)) if after.any() else 0
        before = frame.mask(baseline) if baseline else _range(frame, max(0, first - BASELINE_WINDOWS), first)
        return _checked(frame, _Stretches(before, after, None, None, True))
    active = np.flatnonzero(frame.prompt_tokens.sum(axis=1) > 0)
    if active.size < 2:
        raise ValueError("fewer than two minutes of traffic: nothing to compare")
    start = int(active[0]) + (WARM_UP_WINDOWS if active.size >= 4 * MIN_WINDOWS else 0)
    weight = frame.prompt_tokens.sum(axis=1).astype(np.float64)
    change = DETECTORS[detector](frame.hit_ratio()[start:], weight[start:], rng)
    if change is None:
        middle = start + (frame.windows - start) // 2
        return _checked(frame, _Stretches(_range(frame, start, middle), _range(frame, middle, frame.windows), None, None, False))
    onset, end = start + change.onset, start + change.end
    settle = SETTLE_WINDOWS if end - onset >= SETTLE_WINDOWS + 2 * MIN_WINDOWS else 0
    before = frame.mask(baseline) if baseline else _range(frame, max(start, onset - BASELINE_WINDOWS), onset)
    return _checked(frame, _Stretches(before, _range(frame, onset + settle, end), onset, change.p_value, change.after < change.before))


def _range(frame: Frame, first: int, stop: int) -> NDArray[np.bool_]:
    mask = np.zeros(frame.windows, bool)
    mask[first:stop] = True
    return mask


def _checked(frame: Frame, stretches: _Stretches) -> _Stretches:
    prompt = frame.prompt_tokens.sum(axis=1)
    for name, mask in (("baseline", stretches.before), ("current", stretches.after)):
        if not prompt[mask].sum():
            raise ValueError(f"the {name} stretch holds no traffic")
    return stretches


def _span(frame: Frame, mask: NDArray[np.bool_]) -> Span:
    found = np.flatnonzero(mask)
    return frame.span(int(found[0]), int(found[-1]) + 1)


def _pool_change(frame: Frame, stretches: _Stretches) -> PoolChange | None:
    """The shared pool before and after; None where capacity or reuse times are unknown."""
    capacity = [float(frame.fleet.capacity_blocks[mask].sum(axis=1).mean()) for mask in (stretches.before, stretches.after)]
    if not frame.reuse.blocks.size or min(capacity) <= 0:
        return None
    before, after = (frame.histograms(mask) for mask in (stretches.before, stretches.after))
    return PoolChange(before, after, *capacity)


def _capacity_parts(split: Decomposition, players: Floats, found: Suspects) -> Floats:
    """Contribution of (capacity, own reuse, neighbours) to every tenant [3, ..., T], summing to its capacity causes exactly."""
    columns = [CAUSE_INDEX[name] for name in ("capacity_resize", "capacity_self", "capacity_other")]
    by_cause = np.moveaxis(split.within[..., columns], -1, 0)
    observed = by_cause.sum(axis=0)
    size = np.abs(by_cause)
    if found.capacity_change < -0.02 and not players.any():
        size = np.stack([np.ones_like(observed), np.zeros_like(observed), np.zeros_like(observed)])
    fallback = np.where(size.sum(axis=0) > 0, size / np.maximum(size.sum(axis=0), 1e-300), 1.0 / 3.0)
    mean_share = (split.share_before + split.share_after) / 2.0
    modelled = np.stack([-mean_share * part for part in players])
    return scale_to(modelled, observed, fallback)


def _group_tables(split: Decomposition, players: Floats, found: Suspects) -> dict[str, Floats]:
    """Contribution of every verdict to every tenant [..., T]; summed over both they give dH."""
    tables: dict[str, Floats] = {"tenant_mix_shift": split.mix}
    for cause, verdict in CAUSE_VERDICT.items():
        if cause != "mix":
            tables[verdict] = tables.get(verdict, np.zeros_like(split.mix)) + split.within[..., CAUSE_INDEX[cause]]
    space, own, neighbours = _capacity_parts(split, players, found)
    tables["capacity_pressure"] = tables["capacity_pressure"] + space * (1.0 - found.absent_share) + own
    tables["instance_change"] = tables["instance_change"] + space * found.absent_share
    crowd = "noisy_neighbour" if found.neighbour else "capacity_pressure"
    tables[crowd] = tables.get(crowd, np.zeros_like(split.mix)) + neighbours
    return tables


def _groups(view: Frame, split: Decomposition, draws: Decomposition, players: Floats, found: Suspects) -> tuple[Group, ...]:
    tables, drawn = _group_tables(split, players, found), _group_tables(draws, players, found)
    groups = []
    for verdict, table in tables.items():
        low, high = interval(100.0 * drawn[verdict].sum(axis=-1))
        points = 100.0 * float(table.sum())
        if points or low or high:
            groups.append(Group(verdict, points, low, high, _target(view, verdict, table, found)))
    return tuple(sorted(groups, key=lambda group: group.points))


def _target(view: Frame, verdict: str, table: Floats, found: Suspects) -> str:
    named = {"noisy_neighbour": found.neighbour, "instance_change": found.instance}
    named |= {"capacity_pressure": "fleet", "routing_migration": "router", "event_loss": "events"}
    if verdict in named:
        return named[verdict]
    return view.tenants[int(np.argmin(table))] if table.size and table.min() < 0 else ""


def _verdict(groups: tuple[Group, ...], found: Suspects, change_points: float) -> str:
    engine = found.engine_change_points
    if engine is not None and abs(engine - change_points) > max(2.0, abs(change_points) / 2.0):
        return "measurement"
    return groups[0].verdict if groups and groups[0].points < 0 else "none"


def _contributions(split: Decomposition) -> dict[str, float]:
    by_cause = split.by_cause()
    out = {"mix": 100.0 * float(split.mix.sum())}
    out.update({cause: 100.0 * float(by_cause[index]) for cause, index in CAUSE_INDEX.items() if cause != "hit"})
    return out


def _tenants(view: Frame, split: Decomposition) -> tuple[TenantChange, ...]:
    changes = []
    for index, name in enumerate(view.tenants):
        if not (split.share_before[index] or split.share_after[index]):
            continue
        parts = {"mix": 100.0 * float(split.mix[index])}
        parts.update({cause: 100.0 * float(split.within[index, k]) for k, cause in enumerate(CAUSES) if k})
        shares = float(split.share_before[index]), float(split.share_after[index])
        changes.append(TenantChange(name, *shares, float(split.tenant_before[index]), float(split.tenant_after[index]), parts))
    return tuple(sorted(changes, key=lambda change: sum(change.contributions.values())))


def _prefill(view: Frame, stretches: _Stretches, cost: tuple[float, float] | None) -> dict[str, float]:
    if cost is None or not (cost[0] or cost[1]):
        return {}
    seconds = prefill_seconds(view.tokens, view.context, *cost)
    return _contributions(decompose(seconds[stretches.before].sum(axis=0), seconds[stretches.after].sum(axis=0)))
