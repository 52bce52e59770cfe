"""Rows of the store as the plain inputs of diagnosis, advice and report. SQL lives in `sql/queries/diagnosis_*.sql`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from analytics.advisor import Service
from analytics.causes import CAUSES
from analytics.diagnosis import Diagnosis
from analytics.frame import CAUSE_INDEX, REUSE_KINDS, FleetWindows, Floats, Frame, ReuseTimes, Span
from ingest.errors import KvtideError
from ingest.store import Store

WIDTH_S = 60.0


class EmptyStore(KvtideError):
    """The store holds no windows (of the range asked for)."""


@dataclass(frozen=True)
class Curve:
    """Hit ratio of one tenant (blocks) against capacity in blocks; `placed` capacities are the sum over the instances, split evenly."""

    tenant: str
    scope: str
    capacity_blocks: Floats
    hit_ratio: Floats


def load_frame(store: Store, span: Span | None = None) -> Frame:
    """All windows of the store, or those that start inside `span`.

    The frame runs from the first to the last minute with traffic; minutes without any are zeros. Tenants and instances are in name order.
    Several models of a tenant are added up. Raises `EmptyStore` if there is no traffic. Cost: four queries and O(rows).
    """
    params = query_params(span)
    series = store.named("diagnosis_series", **params) if store.applied() else None
    if series is None or series.num_rows == 0:
        where = "in that range of time" if span else f"in {store.address.shown}"
        raise EmptyStore(f"no windows {where}; run `kvtide demo`, or `kvtide emulate` / `kvtide attach` and then `kvtide work`, first")
    causes, turnover = store.named("diagnosis_causes", **params), store.named("diagnosis_turnover", **params)
    reuse = store.named("diagnosis_reuse_times", **params)
    state = store.named("diagnosis_instances", **({"to": params["to"]} if "to" in params else {}))
    axes = _Axes.of(series, causes, turnover, state)
    tokens, context, other = _causes(causes, axes)
    stored, taken = _turnover(turnover, axes)
    return Frame(
        window_s=axes.window_s,
        tenants=axes.tenants,
        tokens=tokens,
        context=context,
        requests=axes.table(series, "requests", "tenant").astype(np.int64),
        other_tokens=other,
        stored_blocks=stored,
        taken_blocks=taken,
        fleet=_fleet(series, causes, state, axes),
        reuse=_reuse(reuse, axes),
        width_s=WIDTH_S,
    )


def load_curves(store: Store, span: Span | None = None) -> list[Curve]:
    """Every tenant's fleet and placed curve over `span`, at the capacities where it bends. Cost: one query and O(rows log rows)."""
    table = store.named("diagnosis_curves", **query_params(span))
    columns = {name: np.array(table.column(name).to_pylist()) for name in ("tenant", "scope", "instance", "kind")}
    edge, blocks = (np.asarray(table.column(name), np.float64) for name in ("distance_to", "blocks"))
    curves = []
    for tenant in sorted(set(columns["tenant"])):
        for scope in ("fleet", "placed"):
            rows = (columns["tenant"] == tenant) & (columns["scope"] == scope)
            if not rows.any():
                continue
            spread = len(set(columns["instance"][rows])) if scope == "placed" else 1
            finite = rows & (columns["kind"] == "reuse")
            edges, index = np.unique(edge[finite], return_inverse=True)
            hits = np.cumsum(np.bincount(index, weights=blocks[finite], minlength=len(edges)).astype(np.float64))
            total = float(blocks[rows].sum())
            curves.append(Curve(str(tenant), scope, edges * spread, hits / total if total else hits))
    return curves


def load_service(store: Store, span: Span) -> Service:
    """Spread of prefill time and TTFT of the requests in `span`; all zeros if the accesses carried none."""
    row = store.named("diagnosis_service", **query_params(span)).to_pylist()[0]
    return Service(**row)


def save_diagnosis(store: Store, diagnosis: Diagnosis, made_at_us: int) -> str:
    """Write one row of `diagnosis` and return its id. The same diagnosis at the same time is written once."""
    row = diagnosis.row(made_at_us)
    _insert(store, "diagnosis", [row])
    return str(row["id"])


def save_advice(store: Store, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows of `advice` (`Advice.row`)."""
    _insert(store, "advice", list(rows))


def parse_time(text: str) -> float:
    """Seconds since the epoch of an ISO 8601 time; without a zone it is UTC. Raises `ValueError`."""
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _insert(store: Store, table: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    if "contributions" in columns:
        pairs = [list(value.items()) for value in columns["contributions"]]
        columns["contributions"] = pa.array(pairs, pa.map_(pa.string(), pa.float64()))
    renamed = {name.removesuffix("_us"): values for name, values in columns.items()}
    store.insert(table, pa.table(renamed), f"{table}:{rows[0]['id']}")


def query_params(span: Span | None) -> dict[str, str]:
    """Parameters `from` and `to` of the named queries; none for the whole store."""
    if span is None:
        return {}
    low, high = (datetime.fromtimestamp(min(max(t, 0.0), 4_291_747_200.0), UTC).strftime("%Y-%m-%d %H:%M:%S") for t in span)
    return {"from": low, "to": high}


@dataclass(frozen=True)
class _Axes:
    """Names and minutes of a frame, and how table columns fall on them."""

    window_s: Floats
    tenants: tuple[str, ...]
    instances: tuple[str, ...]

    @classmethod
    def of(cls, series: pa.Table, causes: pa.Table, turnover: pa.Table, state: pa.Table) -> _Axes:
        minutes = np.asarray(series.column("window_s"), np.float64)
        window_s = np.arange(minutes.min(), minutes.max() + 1.0, WIDTH_S)
        allocators = {name for name in turnover.column("cause_tenant").to_pylist() if name}
        blamed = {name for name in causes.column("cause_tenant").to_pylist() if name}
        tenants = set(series.column("tenant").to_pylist()) | allocators | blamed | set(turnover.column("tenant").to_pylist())
        instances = set(series.column("instance").to_pylist()) | set(state.column("instance").to_pylist())
        return cls(window_s, tuple(sorted(tenants)), tuple(sorted(instances)))

    def window(self, table: pa.Table) -> NDArray[np.int64]:
        """Window index of every row; may fall outside the frame."""
        index = (np.asarray(table.column("window_s"), np.float64) - self.window_s[0]) // WIDTH_S
        return np.asarray(index, np.int64)

    def code(self, table: pa.Table, column: str) -> NDArray[np.int64]:
        """Index of every row's tenant or instance, -1 if it is not on the axis."""
        names = self.instances if column == "instance" else self.tenants
        index = {name: i for i, name in enumerate(names)}
        return np.array([index.get(name, -1) for name in table.column(column).to_pylist()], np.int64)

    def table(self, source: pa.Table, value: str, column: str) -> Floats:
        """Sum of `value` by window and tenant or instance."""
        out = np.zeros((self.window_s.size, len(self.instances if column == "instance" else self.tenants)))
        np.add.at(out, (self.window(source), self.code(source, column)), np.asarray(source.column(value), np.float64))
        return out


def _inside(axes: _Axes, table: pa.Table) -> pa.Table:
    window = axes.window(table)
    return table.filter(pa.array((window >= 0) & (window < axes.window_s.size)))


def _causes(table: pa.Table, axes: _Axes) -> tuple[NDArray[np.int64], Floats, NDArray[np.int64]]:
    table = _inside(axes, table)
    t = len(axes.tenants)
    window, tenant, who = axes.window(table), axes.code(table, "tenant"), axes.code(table, "cause_tenant")
    cause = np.array([CAUSE_INDEX[name] for name in table.column("cause").to_pylist()], np.int64)
    tokens = np.zeros((axes.window_s.size, t, len(CAUSES)), np.int64)
    context = np.zeros(tokens.shape)
    other = np.zeros((axes.window_s.size, t, t), np.int64)
    count = np.asarray(table.column("tokens"), np.int64)
    np.add.at(tokens, (window, tenant, cause), count)
    np.add.at(context, (window, tenant, cause), np.asarray(table.column("token_context"), np.float64))
    taken = (cause == CAUSE_INDEX["capacity_other"]) & (who >= 0)
    np.add.at(other, (window[taken], tenant[taken], who[taken]), count[taken])
    return tokens, context, other


def _turnover(table: pa.Table, axes: _Axes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = _inside(axes, table)
    window, tenant, who = axes.window(table), axes.code(table, "tenant"), axes.code(table, "cause_tenant")
    blocks = np.asarray(table.column("blocks"), np.int64)
    is_stored = np.array([kind == "stored" for kind in table.column("kind").to_pylist()], bool)
    stored = np.zeros((axes.window_s.size, len(axes.tenants)), np.int64)
    taken = np.zeros_like(stored)
    np.add.at(stored, (window[is_stored], tenant[is_stored]), blocks[is_stored])
    robbed = ~is_stored & (who >= 0) & (who != tenant)
    np.add.at(taken, (window[robbed], who[robbed]), blocks[robbed])
    return stored, taken


def _fleet(series: pa.Table, causes: pa.Table, state: pa.Table, axes: _Axes) -> FleetWindows:
    columns = ("requests", "prompt_tokens", "hit_tokens", "queue_s", "queue_known", "prefill_s", "prefill_known", "ttft_s", "ttft_known")
    given: dict[str, Any] = {name: axes.table(series, name, "instance") for name in columns}
    causes = _inside(axes, causes)
    is_hit = pa.array([name == "hit" for name in causes.column("cause").to_pylist()], pa.bool_())
    given["hit_context"] = axes.table(causes.filter(is_hit), "token_context", "instance")
    given["miss_context"] = axes.table(causes, "token_context", "instance") - given["hit_context"]
    given.update(_state(state, axes))
    return FleetWindows.build(axes.window_s.size, axes.instances, given)


def _state(state: pa.Table, axes: _Axes) -> dict[str, Floats]:
    """Capacity carried forward from row to row, losses, and what the engine counters grew by in each window."""
    shape = (axes.window_s.size, len(axes.instances))
    capacity, lost = np.zeros(shape), np.zeros(shape)
    query, hit = np.full(shape, np.nan), np.full(shape, np.nan)
    window = axes.window(state)
    last: dict[tuple[int, int], tuple[float, float]] = {}
    size, is_up = np.zeros(len(axes.instances)), np.ones(len(axes.instances), bool)
    for row, at, instance in zip(state.to_pylist(), window, axes.code(state, "instance"), strict=True):
        size[instance] = row["capacity_blocks"] or size[instance]
        # A minute of heartbeats alone has no change: a draining instance goes on draining.
        is_up[instance] = row["last_change"] not in ("down", "draining") if row["last_change"] else is_up[instance]
        first = min(max(int(at), 0), shape[0])
        capacity[first:, instance] = size[instance] if is_up[instance] else 0.0
        if row["query_tokens"] is not None:
            key = (int(instance), row["incarnation"])
            now = (row["query_tokens"], row["hit_tokens"] or 0.0)
            before = last.get(key, (0.0, 0.0))
            last[key] = now
            if 0 <= at < shape[0]:
                query[at, instance] = np.nansum([query[at, instance], now[0] - before[0]])
                hit[at, instance] = np.nansum([hit[at, instance], now[1] - before[1]])
        if 0 <= at < shape[0]:
            lost[at, instance] += row["lost"]
    return {"capacity_blocks": capacity, "lost": lost, "engine_query_tokens": query, "engine_hit_tokens": hit}


def _reuse(table: pa.Table, axes: _Axes) -> ReuseTimes:
    table = _inside(axes, table)
    kind = np.array([REUSE_KINDS.index(name) for name in table.column("kind").to_pylist()], np.int64)
    floats = [np.asarray(table.column(name), np.float64) for name in ("from_ms", "to_ms", "blocks")]
    return ReuseTimes(axes.window(table), axes.code(table, "tenant"), axes.code(table, "instance"), kind, *floats)
