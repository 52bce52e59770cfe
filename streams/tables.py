"""Rows that follow from the events by grouping alone: raw accesses with their causes, instance rows, traffic and residency per window."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from streams.causes import CAUSES, HIT
from streams.order import Pending

_TS = pa.timestamp("us", tz="UTC")


def microseconds(column: pa.Array) -> pa.Array:
    """Milliseconds (float64, null kept) as whole microseconds, so that sums are exact."""
    return pc.cast(pc.round(pc.multiply(column, 1000.0)), pa.int64())


def known(column: pa.Array) -> pa.Array:
    """1 where a value is known, 0 where it is null."""
    return pc.is_valid(column).cast(pa.int64())


def access_raw(rows: Pending, cause_tokens: NDArray[np.int64], partition: int) -> pa.Table | None:
    """Accesses with `causes`, a map of cause to tokens. `cause_tokens` int64[n, len(CAUSES)]."""
    if not len(rows.arrival):
        return None
    columns = _raw_columns(rows, partition)
    columns["late"] = pa.array(rows.late.astype(np.uint8))
    columns["causes"] = _cause_map(cause_tokens)
    return pa.table(columns)


def instance_raw(rows: Pending, partition: int) -> pa.Table | None:
    """Instance rows as they came."""
    if not len(rows.arrival):
        return None
    columns = _raw_columns(rows, partition)
    columns["reports_residency"] = columns["reports_residency"].cast(pa.uint8())
    return pa.table(columns)


def _raw_columns(rows: Pending, partition: int) -> dict[str, pa.Array]:
    columns = {name: rows.batch.column(name) for name in rows.batch.schema.names}
    columns["ts"] = columns.pop("ts_us").cast(_TS)
    columns["partition"] = pa.array(np.full(len(rows.arrival), partition, np.uint16))
    columns["offset"] = pa.array(rows.offset)
    return columns


def _cause_map(cause_tokens: NDArray[np.int64]) -> pa.Array:
    missed = cause_tokens.copy()
    missed[:, HIT] = 0
    row, cause = np.nonzero(missed)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(missed))))).astype(np.int32)
    names = pa.array(CAUSES, pa.string()).take(pa.array(cause))
    return pa.MapArray.from_arrays(pa.array(offsets), names, pa.array(missed[row, cause].astype(np.uint64)))


def traffic(rows: Pending) -> pa.Table | None:
    """Requests, tokens and times per (tenant, model, instance, category)."""
    if not len(rows.arrival):
        return None
    batch = rows.batch
    ones = pa.array(np.ones(batch.num_rows, np.int64))
    failed = pc.not_equal(batch.column("outcome"), "served").cast(pa.int64())
    values = {
        "requests": ones,
        "failed_requests": failed,
        "late_requests": pa.array(rows.late.astype(np.int64)),
        "prompt_tokens": batch.column("prompt_tokens"),
        "hit_tokens": batch.column("hit_tokens"),
        "output_tokens": pc.fill_null(batch.column("output_tokens"), 0),
    }
    for name in ("queue", "prefill", "ttft"):
        column = batch.column(f"{name}_ms")
        values[f"{name}_us"] = pc.fill_null(microseconds(column), 0)
        values[f"{name}_known"] = known(column)
    keys = {name: batch.column(name) for name in ("tenant", "model", "instance")}
    keys["category"] = pc.fill_null(batch.column("category"), "")
    return _grouped(keys, values)


def residency(rows: Pending) -> pa.Table | None:
    """Blocks stored, evicted and cleared per (tenant, model, instance, kind, reason, cause tenant)."""
    if not len(rows.arrival):
        return None
    batch = rows.batch
    keys = {name: batch.column(name) for name in ("tenant", "model", "instance", "kind")}
    keys |= {name: pc.fill_null(batch.column(name), "") for name in ("reason", "cause_tenant")}
    idle = batch.column("idle_ms")
    values = {
        "blocks": pa.array(np.ones(batch.num_rows, np.int64)),
        "idle_ms": pc.fill_null(pc.cast(pc.round(idle), pa.int64()), 0),
        "idle_known": known(idle),
    }
    return _grouped(keys, values)


def _grouped(keys: dict[str, pa.Array], values: dict[str, pa.Array]) -> pa.Table:
    """Sums of `values` per distinct key, sorted by key; all integers, so exact."""
    table = pa.table({**keys, **values}).group_by(list(keys)).aggregate([(name, "sum") for name in values])
    table = table.sort_by([(name, "ascending") for name in keys])
    named = {name: table.column(name) for name in keys}
    return pa.table({**named, **{name: table.column(f"{name}_sum").cast(pa.uint64()) for name in values}})
