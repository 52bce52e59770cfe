"""Replay of what the store remembers: recent accesses as a workload, the fleet as it stands, and routers compared on both."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from analytics.advisor import Advice, advise_route
from analytics.costs import fit_prefill_cost, token_context
from analytics.fleet.compare import RouterRow, compare_routers
from analytics.fleet.emulator import FleetConfig
from analytics.fleet.routers import RouterSpec
from analytics.fleet.workload import Workload
from analytics.frame import Span
from ingest.store import Store

# Routers that are put beside the current one: the fixed weighted sum swept, affinity, and load alone.
CANDIDATES = (
    RouterSpec("session_affinity"),
    RouterSpec("least_load"),
    *(RouterSpec("weighted_sum", {"w": w}) for w in (0.0, 0.3, 0.5, 0.7, 0.9)),
)
WARM_UP_RATIO = 1 / 3  # of the replayed time: caches start empty


def route_advice(store: Store, span: Span, *, seed: int = 0) -> Advice | None:
    """Route advice from replaying the accesses of `span` under every candidate router on the fleet as it was in `span`.

    The current router is the one that most accesses of the second half of `span` name; one that is not a candidate is judged by what was
    observed. None when there is nothing to replay: no accesses with chains, no prefill times, or no instance.
    Cost: one emulation a candidate.
    """
    rows = store.named("replay_accesses", **_range(span))
    config = fleet_config(store, rows, span, seed)
    if config is None:
        return None
    workload = recent_workload(rows)
    from_s = WARM_UP_RATIO * (span.to_s - span.from_s)
    outcomes = {row.router.label: row for row in compare_routers(workload, config, CANDIDATES, seed=seed, from_s=from_s)}
    current = _current_router(rows)
    outcomes.setdefault(current, _observed(rows, current))
    return advise_route(outcomes, current, span.to_s)


def fleet_config(store: Store, rows: pa.Table, span: Span, seed: int = 0) -> FleetConfig | None:
    """The fleet of `span`: instances up at its end, their mean capacity, and the prefill cost fitted on `rows`; None if unknown."""
    instances = store.named("replay_instances", **_range(span))
    capacity = [blocks for blocks in instances.column("capacity_blocks").to_pylist() if blocks]
    cost = _fitted_cost(rows)
    if not capacity or cost is None or not pc.any(pc.greater(pc.list_value_length(rows.column("chain")), 0)).as_py():
        return None
    a, b = cost
    return FleetConfig(instances=len(capacity), capacity_blocks=round(sum(capacity) / len(capacity)), cost_a_s=a, cost_b_s=b, seed=seed)


def recent_workload(rows: pa.Table) -> Workload:
    """Workload of stored accesses; a request arrived when it was looked up less its time in the queue. One model, one block size."""
    queue_us = np.nan_to_num(_floats(rows, "queue_ms")) * 1e3
    arrived_us = rows.column("ts_us").to_numpy() - np.rint(queue_us).astype(np.int64)
    rows = rows.take(np.argsort(arrived_us, kind="stable"))
    arrived_us = np.sort(arrived_us)
    chains = rows.column("chain").combine_chunks()
    tenant, tenants = _coded(rows, "tenant")
    session, sessions = _coded(rows, "session")
    category, categories = _coded(rows, "category")
    return Workload(
        arrived_at_us=arrived_us - arrived_us[0],
        tenant=tenant,
        tenants=tenants,
        prompt_tokens=_ints(rows, "prompt_tokens"),
        output_tokens=_ints(rows, "output_tokens"),
        block_size=int(rows.column("block_size")[0].as_py()),
        offsets=np.concatenate(([0], np.cumsum(pc.list_value_length(chains).to_numpy()))).astype(np.int64),
        hashes=chains.flatten().to_numpy().astype(np.uint64),
        session=session,
        sessions=sessions,
        category=category,
        categories=categories,
        turn=_ints(rows, "turn").astype(np.int32),
        model=rows.column("model")[0].as_py(),
        request_ids=tuple(rows.column("request_id").to_pylist()),
        origin="replay",
    )


def _fitted_cost(rows: pa.Table) -> tuple[float, float] | None:
    served = rows.filter(pc.equal(rows.column("outcome"), "served"))
    hit, prompt = _ints(served, "hit_tokens"), _ints(served, "prompt_tokens")
    try:
        return fit_prefill_cost((prompt - hit).astype(np.float64), token_context(hit, prompt), _floats(served, "prefill_ms") / 1e3)
    except ValueError:
        return None


def _current_router(rows: pa.Table) -> str:
    late = rows.slice(rows.num_rows // 2).column("router").drop_null()
    counts = pc.value_counts(late.combine_chunks()).to_pylist()
    return max(counts, key=lambda item: item["counts"])["values"] if counts else "unknown"


def _observed(rows: pa.Table, router: str) -> RouterRow:
    """What the fleet itself did in the compared part of the span, as a row beside the replayed ones."""
    late = rows.slice(round(rows.num_rows * WARM_UP_RATIO))
    ttft_s = _floats(late, "ttft_ms")
    ttft_s = ttft_s[np.isfinite(ttft_s)] / 1e3
    prompt = int(_ints(late, "prompt_tokens").sum())
    mean, p50, p99 = (ttft_s.mean(), *np.quantile(ttft_s, [0.5, 0.99])) if len(ttft_s) else (np.nan,) * 3
    return RouterRow(
        RouterSpec("round_robin"),  # stands in: advice reads the figures and the label it was given
        requests=late.num_rows,
        failed=pc.sum(pc.not_equal(late.column("outcome"), "served")).as_py() or 0,
        hit_ratio=float(_ints(late, "hit_tokens").sum() / max(prompt, 1)),
        ttft_mean_s=float(mean),
        ttft_p50_s=float(p50),
        ttft_p99_s=float(p99),
        prefill_s=float(np.nansum(_floats(late, "prefill_ms")) / 1e3),
    )


def _range(span: Span) -> dict[str, str]:
    return {
        name: datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S") for name, at_s in (("from", span.from_s), ("to", span.to_s))
    }


def _ints(rows: pa.Table, name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return pc.fill_null(rows.column(name), 0).to_numpy().astype(np.int64)


def _floats(rows: pa.Table, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return pc.fill_null(rows.column(name).cast(pa.float64()), float("nan")).to_numpy()


def _coded(rows: pa.Table, name: str) -> tuple[np.ndarray[tuple[int], np.dtype[np.int32]], tuple[str, ...]]:
    """Codes into the distinct names, -1 for null."""
    column = rows.column(name).combine_chunks().dictionary_encode()
    return pc.fill_null(column.indices, -1).to_numpy(zero_copy_only=False).astype(np.int32), tuple(column.dictionary.to_pylist())
