"""Rows that follow from the events by grouping alone: raw accesses with their causes, instance rows, traffic and residency per window."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from analytics.causes import CAUSES
from streams.causes import HIT
from streams.codes import coded, group, sums
from streams.order import Pending

_TS = pa.timestamp("us", tz="UTC")


def microseconds(column: pa.Array) -> pa.Array:
    """Milliseconds (float64, null kept) as whole microseconds, so that sums are exact."""
    return pc.cast(pc.round(pc.multiply(column, 1000.0)), pa.int64())


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
    columns = {name: plain(rows.batch.column(name)) for name in rows.batch.schema.names}
    columns["ts"] = columns.pop("ts_us").cast(_TS)
    columns["partition"] = pa.array(np.full(len(rows.arrival), partition, np.uint16))
    columns["offset"] = pa.array(rows.offset)
    return columns


def plain(column: pa.Array) -> pa.Array:
    """The column without dictionary encoding."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _cause_map(cause_tokens: NDArray[np.int64]) -> pa.Array:
    missed = cause_tokens.copy()
    missed[:, HIT] = 0
    row, cause = np.nonzero(missed)
    offsets = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=len(missed))))).astype(np.int32)
    names = pa.array(CAUSES, pa.string()).take(pa.array(cause))
    return pa.MapArray.from_arrays(pa.array(offsets), names, pa.array(missed[row, cause].astype(np.uint64)))


def traffic(rows: Pending) -> pa.Table | None:
    """Requests, tokens and times per (tenant, model, instance, category)."""
    batch = rows.batch
    values = {
        "requests": np.ones(batch.num_rows, np.int64),
        "failed_requests": numpy(pc.not_equal(batch.column("outcome").cast(pa.string()), "served")),
        "late_requests": rows.late,
        "prompt_tokens": numpy(batch.column("prompt_tokens")),
        "hit_tokens": numpy(batch.column("hit_tokens")),
        "output_tokens": numpy(batch.column("output_tokens")),
    }
    for name in ("queue", "prefill", "ttft"):
        column = batch.column(f"{name}_ms")
        values[f"{name}_us"] = numpy(microseconds(column))
        values[f"{name}_known"] = numpy(pc.is_valid(column))
    return _grouped(batch, ("tenant", "model", "instance", "category"), values)


def residency(rows: Pending) -> pa.Table | None:
    """Blocks stored, evicted and cleared per (tenant, model, instance, kind, reason, cause tenant)."""
    batch = rows.batch
    idle = batch.column("idle_ms")
    values = {
        "blocks": np.ones(batch.num_rows, np.int64),
        "idle_ms": numpy(pc.round(idle)),
        "idle_known": numpy(pc.is_valid(idle)),
    }
    return _grouped(batch, ("tenant", "model", "instance", "kind", "reason", "cause_tenant"), values)


def numpy(column: pa.Array) -> NDArray[Any]:
    """Values of a numeric or boolean column, 0 for null."""
    filled = column if column.null_count == 0 else pc.fill_null(column, 0)
    return filled.to_numpy(zero_copy_only=False)


def _grouped(batch: pa.RecordBatch, keys: tuple[str, ...], values: dict[str, NDArray[Any]]) -> pa.Table | None:
    """Sums of `values` per distinct key, sorted by key."""
    if not batch.num_rows:
        return None
    number, groups = group([coded(batch.column(name)) for name in keys])
    named = {name: pa.array(column, pa.string()) for name, column in zip(keys, zip(*groups, strict=True), strict=True)}
    return pa.table({**named, **sums(number, values, len(groups))})
