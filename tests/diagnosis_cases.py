"""Synthetic frames whose cause of decline is known: two tenants and a scanner on four instances, 40 minutes, fault at minute 22."""

from __future__ import annotations

from typing import Any

import numpy as np

from analytics.causes import CAUSES
from analytics.frame import CAUSE_INDEX, FleetWindows, Frame, ReuseTimes

WINDOWS, ONSET = 40, 22
TENANTS = ("chat", "code", "scan")
INSTANCES = ("p0", "p1", "p2", "p3")
START_S = 1_700_000_040.0
BASE = {
    "chat": {"hit": 0.70, "granularity": 0.05, "capacity_self": 0.02, "capacity_other": 0.03, "cold": 0.20},
    "code": {"hit": 0.80, "granularity": 0.02, "capacity_self": 0.02, "capacity_other": 0.02, "cold": 0.14},
    "scan": {"hit": 0.10, "granularity": 0.05, "capacity_self": 0.05, "capacity_other": 0.05, "cold": 0.75},
}
SHARES = {"chat": 0.50, "code": 0.45, "scan": 0.05}
TOKENS = 1_000_000
BLOCK = 16


def shifted(shares: dict[str, dict[str, float]], tenants: tuple[str, ...], **move: float) -> dict[str, dict[str, float]]:
    """Shares of each cause with `move` (cause -> share) taken from the hits of `tenants`."""
    out = {name: dict(parts) for name, parts in shares.items()}
    for name in tenants:
        for cause, amount in move.items():
            out[name][cause] = out[name].get(cause, 0.0) + amount
            out[name]["hit"] -= amount
    return out


def exponential_reuse(mean_s: float, blocks: float, cold_ratio: float) -> list[tuple[int, float, float, float]]:
    """Rows (kind, from_ms, to_ms, blocks) of reuse times that are exponential with this mean, and a cold share."""
    edges = np.concatenate([[0.0], np.geomspace(100.0, 20.0 * mean_s * 1000.0, 80)])
    mass = np.diff(1.0 - np.exp(-edges / 1000.0 / mean_s))
    rows = [(0, float(a), float(b), blocks * (1 - cold_ratio) * float(m)) for a, b, m in zip(edges, edges[1:], mass, strict=False)]
    return [*rows, (1, 0.0, 0.0, blocks * cold_ratio)]


def frame(
    after: dict[str, dict[str, float]] | None = None,
    *,
    shares_after: dict[str, float] | None = None,
    capacity_after: float = 1.0,
    down: str | None = None,
    stored_after: dict[str, float] | None = None,
    culprit: str = "chat",
    reuse_after: dict[str, tuple[float, float]] | None = None,
    noise: float = 0.01,
    seed: int = 1,
    engine_shift: float = 0.0,
    load_after: float = 1.0,
) -> Frame:
    """A frame that sits at `BASE` until minute 22 and at `after` from there on.

    `capacity_after` scales every instance, `down` removes one, `stored_after` multiplies a tenant's stores, `culprit` is whose allocations
    evict the others, `reuse_after` gives a tenant's (mean reuse time in s, block rate factor), `engine_shift` moves the engines' counters.
    """
    rng = np.random.default_rng(seed)
    t, k = len(TENANTS), len(CAUSES)
    tokens, other = np.zeros((WINDOWS, t, k), np.int64), np.zeros((WINDOWS, t, t), np.int64)
    stored, taken = np.zeros((WINDOWS, t), np.int64), np.zeros((WINDOWS, t), np.int64)
    rows: list[tuple[float, ...]] = []
    for window in range(WINDOWS):
        late = window >= ONSET
        table, shares = (after or BASE, shares_after or SHARES) if late else (BASE, SHARES)
        for index, name in enumerate(TENANTS):
            wobble = np.clip(rng.normal(1.0, noise, k), 0.5, 1.5)
            parts = np.array([table[name].get(cause, 0.0) for cause in CAUSES]) * wobble
            prompt = TOKENS * shares[name] * (load_after if late else 1.0)
            tokens[window, index] = np.round(prompt * parts / parts.sum())
            who = TENANTS.index(culprit) if culprit != name else (index + 1) % 2
            other[window, index, who] = tokens[window, index, CAUSE_INDEX["capacity_other"]]
            factor = (stored_after or {}).get(name, 1.0) if late else 1.0
            stored[window, index] = round(prompt * (1 - table[name]["hit"]) / BLOCK * factor)
            taken[window, who] += other[window, index, who] // BLOCK
            mean_s, rate = (reuse_after or {}).get(name, (60.0, 1.0)) if late else (60.0, 1.0)
            for kind, low, high, blocks in exponential_reuse(mean_s, prompt / BLOCK * rate / 4, table[name].get("cold", 0.0)):
                rows += [(window, index, i, kind, low, high, blocks) for i in range(len(INSTANCES))]
    return Frame(
        window_s=START_S + 60.0 * np.arange(WINDOWS),
        tenants=TENANTS,
        tokens=tokens,
        context=tokens * 2000.0,
        requests=np.maximum(tokens.sum(axis=2) // 4000, 1),
        other_tokens=other,
        stored_blocks=stored,
        taken_blocks=taken,
        fleet=_fleet(tokens, capacity_after, down, engine_shift),
        reuse=_reuse(rows),
    )


def _fleet(tokens: np.ndarray[Any, Any], capacity_after: float, down: str | None, engine_shift: float) -> FleetWindows:
    n = len(INSTANCES)
    capacity = np.full((WINDOWS, n), 60_000.0)
    capacity[ONSET:] *= capacity_after
    lost = np.zeros((WINDOWS, n), np.int64)
    if down:
        capacity[ONSET:, INSTANCES.index(down)] = 0.0
        lost[ONSET, INSTANCES.index(down)] = 1
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    prompt = tokens.sum(axis=(1, 2))[:, None] * weights
    hit = tokens[:, :, 0].sum(axis=1)[:, None] * weights
    miss = prompt - hit
    requests = np.maximum(prompt // 4000, 1)
    prefill_s = 4e-5 * miss + 1e-9 * miss * 2000.0
    engine_hit = hit.copy()
    engine_hit[ONSET:] += engine_shift * prompt[ONSET:]
    return FleetWindows.build(
        WINDOWS,
        INSTANCES,
        {
            "requests": requests, "prompt_tokens": prompt, "hit_tokens": hit, "miss_context": miss * 2000.0, "hit_context": hit * 2000.0,
            "prefill_s": prefill_s, "prefill_known": requests, "queue_s": requests * 0.02, "queue_known": requests,
            "ttft_s": prefill_s + requests * 0.03, "ttft_known": requests, "capacity_blocks": capacity, "lost": lost,
            "engine_query_tokens": prompt, "engine_hit_tokens": engine_hit,
        },
    )  # fmt: skip


def _reuse(rows: list[tuple[float, ...]]) -> ReuseTimes:
    columns = np.array(rows, np.float64).T
    ints = [column.astype(np.int64) for column in columns[:4]]
    return ReuseTimes(*ints, *columns[4:])


ALL = ("chat", "code")
CASES: dict[str, dict[str, Any]] = {
    "routing_migration": {"after": shifted(BASE, ALL, routing=0.12, broken_prefix=0.02)},
    "instance_change": {"after": shifted(BASE, ALL, instance=0.10, capacity_self=0.02), "down": "p2"},
    "capacity_pressure": {
        "after": shifted(BASE, ALL, capacity_self=0.07, capacity_other=0.08),
        "capacity_after": 0.4,
        "stored_after": {"chat": 1.3},
    },
    "noisy_neighbour": {
        "after": shifted(shifted(BASE, ALL, capacity_other=0.12), ("scan",), cold=0.05),
        "stored_after": {"scan": 12.0},
        "culprit": "scan",
        "reuse_after": {"scan": (60.0, 12.0)},
    },
    "tenant_reuse_shift": {"after": shifted(BASE, ("chat",), cold=0.20)},
    "tenant_mix_shift": {"after": BASE, "shares_after": {"chat": 0.45, "code": 0.40, "scan": 0.15}},
    "prompt_shape": {"after": shifted(BASE, ALL, granularity=0.10)},
    "event_loss": {"after": shifted(BASE, ALL, unobserved=0.15)},
    "measurement": {"after": shifted(BASE, ALL, cold=0.15), "engine_shift": 0.142},
    "none": {},
}
