"""The event contract: what travels in `kv.events`, as Arrow schemas and as msgspec structs, with checks that keep neighbours alive.

A record is one Arrow IPC stream of one kind. `decode` returns the rows that satisfy the contract and, apart, every row that does not,
with its reason and bytes: a bad row never takes its neighbours with it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.errors import InvalidRecord

SCHEMA_VERSION = 1
TOPIC = "kv.events"
DLQ_TOPIC = "kv.dlq"

Kind = Literal["access", "residency", "instance"]
KINDS: tuple[Kind, ...] = ("access", "residency", "instance")
OUTCOMES = ("served", "throttled", "shed", "failed")
RESIDENCY_KINDS = ("stored", "evicted", "cleared")
LIFECYCLES = ("up", "draining", "down", "cleared", "heartbeat")
SOURCE_STATES = ("live", "silent", "gap", "degraded")
MAX_TOKENS = 1 << 31


class Access(msgspec.Struct, kw_only=True, frozen=True):
    """One prefill request looking up its chain on one instance; see docs/design.md section 3 for the fields."""

    ts_us: int
    source: str
    seq: int
    tenant: str
    model: str
    instance: str
    incarnation: int
    request_id: str
    session: str | None = None
    parent_session: str | None = None
    category: str | None = None
    turn: int | None = None
    prompt_tokens: int
    hit_tokens: int
    hit_dram_tokens: int | None = None
    hit_disk_tokens: int | None = None
    block_size: int
    chain: list[int]
    output_tokens: int | None = None
    queue_ms: float | None = None
    prefill_ms: float | None = None
    ttft_ms: float | None = None
    router: str | None = None
    outcome: str = "served"


class Residency(msgspec.Struct, kw_only=True, frozen=True):
    """A block's first store on, or last removal from, one instance; `cleared` is all of the tenant's blocks on that instance.

    `reason` of an eviction is `pressure` (an allocation took it; `cause_tenant` says whose), `resize` (capacity was cut), `restart`,
    `clear`, `drain` or `removal`.
    """

    ts_us: int
    source: str
    seq: int
    tenant: str
    model: str
    instance: str
    incarnation: int
    kind: str
    block: int
    block_size: int
    position: int | None = None
    tier: str = "hbm"
    reason: str | None = None
    cause_tenant: str | None = None
    idle_ms: float | None = None


class Instance(msgspec.Struct, kw_only=True, frozen=True):
    """State of one instance: lifecycle changes and heartbeats; sent to every partition.

    Lifecycle `up` opens an incarnation, `down` and `cleared` end all residency of the instance (`reason`: restart, removal, drain, clear).
    `reports_residency` false means that this instance sends no residency rows. Counters are cumulative within an incarnation.
    """

    ts_us: int
    source: str
    seq: int
    instance: str
    incarnation: int
    lifecycle: str
    reason: str | None = None
    capacity_blocks: int | None = None
    used_blocks: int | None = None
    pinned_blocks: int | None = None
    evictable_blocks: int | None = None
    running: int | None = None
    waiting: int | None = None
    queued_tokens: int | None = None
    query_tokens: int | None = None
    hit_tokens: int | None = None
    source_state: str = "live"
    reports_residency: bool = True


STRUCTS: dict[Kind, type[msgspec.Struct]] = {"access": Access, "residency": Residency, "instance": Instance}

_U64 = pa.uint64()
_ORDER = [("ts_us", pa.int64(), False), ("source", pa.string(), False), ("seq", _U64, False)]
_PLACE = [("tenant", pa.string(), False), ("model", pa.string(), False), ("instance", pa.string(), False),
          ("incarnation", _U64, False)]  # fmt: skip


def _schema(kind: Kind, fields: Iterable[tuple[str, pa.DataType, bool]]) -> pa.Schema:
    meta = {"kvtide.kind": kind, "kvtide.schema": str(SCHEMA_VERSION)}
    return pa.schema([pa.field(name, type_, nullable=nullable) for name, type_, nullable in fields], metadata=meta)


SCHEMAS: dict[Kind, pa.Schema] = {
    "access": _schema(
        "access",
        [
            *_ORDER,
            *_PLACE,
            ("request_id", pa.string(), False),
            ("session", pa.string(), True),
            ("parent_session", pa.string(), True),
            ("category", pa.string(), True),
            ("turn", pa.int32(), True),
            ("prompt_tokens", pa.int64(), False),
            ("hit_tokens", pa.int64(), False),
            ("hit_dram_tokens", pa.int64(), True),
            ("hit_disk_tokens", pa.int64(), True),
            ("block_size", pa.int32(), False),
            ("chain", pa.list_(pa.field("item", _U64, nullable=False)), False),
            ("output_tokens", pa.int64(), True),
            ("queue_ms", pa.float64(), True),
            ("prefill_ms", pa.float64(), True),
            ("ttft_ms", pa.float64(), True),
            ("router", pa.string(), True),
            ("outcome", pa.string(), False),
        ],
    ),
    "residency": _schema(
        "residency",
        [
            *_ORDER,
            *_PLACE,
            ("kind", pa.string(), False),
            ("block", _U64, False),
            ("block_size", pa.int32(), False),
            ("position", pa.int32(), True),
            ("tier", pa.string(), False),
            ("reason", pa.string(), True),
            ("cause_tenant", pa.string(), True),
            ("idle_ms", pa.float64(), True),
        ],
    ),
    "instance": _schema(
        "instance",
        [
            *_ORDER,
            ("instance", pa.string(), False),
            ("incarnation", _U64, False),
            ("lifecycle", pa.string(), False),
            ("reason", pa.string(), True),
            ("capacity_blocks", pa.int64(), True),
            ("used_blocks", pa.int64(), True),
            ("pinned_blocks", pa.int64(), True),
            ("evictable_blocks", pa.int64(), True),
            ("running", pa.int32(), True),
            ("waiting", pa.int32(), True),
            ("queued_tokens", pa.int64(), True),
            ("query_tokens", pa.int64(), True),
            ("hit_tokens", pa.int64(), True),
            ("source_state", pa.string(), False),
            ("reports_residency", pa.bool_(), False),
        ],
    ),
}


@dataclass(frozen=True, slots=True)
class Record:
    """One message of the event log: packed bytes plus the headers that name its kind and schema version."""

    kind: Kind
    value: bytes
    schema: int = SCHEMA_VERSION

    @property
    def headers(self) -> dict[str, bytes]:
        return {"kind": self.kind.encode(), "schema": str(self.schema).encode()}


def partition_of(tenant: str, partitions: int) -> int:
    """Partition that owns a tenant: CRC-32 of its UTF-8 name modulo `partitions`; the same in every producer and for ever."""
    return zlib.crc32(tenant.encode()) % partitions


def to_batch(kind: Kind, events: Iterable[msgspec.Struct]) -> pa.RecordBatch:
    """Arrow batch of structs of one kind. Cost: O(rows); hot paths build columns instead."""
    rows = [msgspec.structs.asdict(event) for event in events]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMAS[kind])


def encode(kind: Kind, batch: pa.RecordBatch) -> Record:
    """Pack a batch that has the kind's columns (any order) into a record.

    Raises `KeyError` for a missing column and `pyarrow.ArrowInvalid` for one that does not fit its type.
    """
    schema = SCHEMAS[kind]
    columns = [batch.column(field.name) for field in schema]
    arrays = [c if c.type == f.type else c.cast(f.type) for c, f in zip(columns, schema, strict=True)]
    packed = pa.RecordBatch.from_arrays(arrays, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(packed)
    return Record(kind, sink.getvalue().to_pybytes())


def decode(value: bytes, headers: Mapping[str, bytes]) -> tuple[Kind, pa.RecordBatch, list[InvalidRecord]]:
    """Kind, good rows and bad rows of one record.

    Raises `InvalidRecord` when the record as a whole cannot be read: unknown kind, other schema version, broken Arrow bytes, missing,
    unknown or mistyped columns. Rows that break a rule come back as `InvalidRecord`s whose `raw` is a one-row record.
    Cost: O(bytes) for a zero-copy read plus a few vectorised passes over the columns.
    """
    kind = _kind_of(value, headers)
    batch = _read(kind, value)
    bad = _violations(kind, batch)
    if not bad:
        return kind, batch, []
    rejected = [InvalidRecord(why, f"row {row} of a {kind} record", encode(kind, batch.slice(row, 1)).value)
                for row, why in sorted(bad.items())]  # fmt: skip
    keep = np.ones(batch.num_rows, dtype=bool)
    keep[list(bad)] = False
    return kind, batch.filter(pa.array(keep)), rejected


def _kind_of(value: bytes, headers: Mapping[str, bytes]) -> Kind:
    kind = headers.get("kind", b"").decode("utf-8", "replace")
    version = headers.get("schema", b"").decode("utf-8", "replace")
    if kind not in KINDS:
        raise InvalidRecord("unknown_kind", f"header kind={kind!r}, expected one of {', '.join(KINDS)}", value)
    if version != str(SCHEMA_VERSION):
        raise InvalidRecord("unknown_schema", f"schema version {version!r}, this worker reads {SCHEMA_VERSION}", value)
    return kind


def _read(kind: Kind, value: bytes) -> pa.RecordBatch:
    expected = SCHEMAS[kind]
    try:
        with pa.ipc.open_stream(pa.py_buffer(value)) as reader:
            batches = list(reader)
            if not reader.schema.equals(expected, check_metadata=False):
                raise _schema_error(reader.schema, expected, value)
        batch = batches[0] if len(batches) == 1 else _joined(batches, expected)
        batch.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InvalidRecord("not_arrow", str(error).splitlines()[0], value) from error
    return batch


def _schema_error(found: pa.Schema, expected: pa.Schema, value: bytes) -> InvalidRecord:
    unknown = [name for name in found.names if name not in expected.names]
    missing = [name for name in expected.names if name not in found.names]
    if unknown:
        return InvalidRecord("unknown_field", f"columns {unknown} are not in schema {SCHEMA_VERSION}", value)
    if missing:
        return InvalidRecord("missing_field", f"columns {missing} are absent", value)
    wrong = next((f for f in expected if found.field(f.name).type != f.type), None)
    if wrong is not None:
        return InvalidRecord("wrong_type", f"column {wrong.name} is {found.field(wrong.name).type}, expected {wrong.type}", value)
    return InvalidRecord("wrong_type", "columns are in another order or allow nulls where the contract does not", value)


def _joined(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if not batches:
        return pa.RecordBatch.from_pylist([], schema=schema)
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


_ENUMS: dict[Kind, dict[str, tuple[str, ...]]] = {
    "access": {"outcome": OUTCOMES},
    "residency": {"kind": RESIDENCY_KINDS},
    "instance": {"lifecycle": LIFECYCLES, "source_state": SOURCE_STATES},
}
_NOT_NEGATIVE = ("ts_us", "prompt_tokens", "hit_tokens", "output_tokens", "position", "capacity_blocks")


def _clean(kind: Kind, batch: pa.RecordBatch) -> bool:
    """Whether every row keeps every rule: the cheap look that nearly all records pass, in a few reductions instead of a mask a rule."""
    for field in SCHEMAS[kind]:
        if not field.nullable and batch.column(field.name).null_count:
            return False
    for name in _NOT_NEGATIVE:
        if name in batch.schema.names and _least(batch.column(name)) < 0:
            return False
    for name, allowed in _ENUMS[kind].items():
        if not set(pc.unique(batch.column(name)).to_pylist()) <= set(allowed):
            return False
    if kind != "instance" and batch.column("block_size").to_numpy().min(initial=1) < 1:
        return False
    return kind != "access" or _lengths_agree(batch)


def _least(column: pa.Array) -> int:
    if column.null_count == 0:
        return int(column.to_numpy().min(initial=0))
    least = pc.min(column).as_py()
    return 0 if least is None else int(least)


def _lengths_agree(batch: pa.RecordBatch) -> bool:
    prompt, block_size = batch.column("prompt_tokens").to_numpy(), batch.column("block_size").to_numpy().astype(np.int64)
    chain = np.diff(batch.column("chain").offsets.to_numpy()).astype(np.int64)
    hit = batch.column("hit_tokens").to_numpy()
    return bool(((hit <= prompt) & (prompt <= MAX_TOKENS) & (chain * block_size <= prompt)).all())


def _violations(kind: Kind, batch: pa.RecordBatch) -> dict[int, str]:
    """First broken rule of each bad row, by row index."""
    if _clean(kind, batch):
        return {}
    bad: dict[int, str] = {}

    def mark(mask: pa.Array, reason: str) -> None:
        for row in np.flatnonzero(np.asarray(pc.fill_null(mask, False))):
            bad.setdefault(int(row), reason)

    for field in SCHEMAS[kind]:
        if not field.nullable and batch.column(field.name).null_count:
            mark(pc.is_null(batch.column(field.name)), f"null_{field.name}")
    for name in _NOT_NEGATIVE:
        if name in batch.schema.names:
            mark(pc.less(batch.column(name), 0), f"negative_{name}")
    for name, allowed in _ENUMS[kind].items():
        mark(_not_in(batch.column(name), allowed), f"unknown_{'residency_kind' if name == 'kind' else name}")
    if kind != "instance":
        mark(pc.less(batch.column("block_size"), 1), "block_size_below_1")
    if kind == "access":
        _access_rules(batch, mark)
    return bad


def _access_rules(batch: pa.RecordBatch, mark: Any) -> None:
    prompt, block_size = batch.column("prompt_tokens"), batch.column("block_size")
    mark(pc.greater(prompt, MAX_TOKENS), "prompt_tokens_too_large")
    mark(pc.greater(batch.column("hit_tokens"), prompt), "hit_exceeds_prompt")
    tokens = pc.multiply(pc.list_value_length(batch.column("chain")).cast(pa.int64()), block_size.cast(pa.int64()))
    mark(pc.greater(tokens, prompt), "chain_longer_than_prompt")


def _not_in(column: pa.Array, allowed: tuple[str, ...]) -> pa.Array:
    return pc.invert(pc.is_in(column, value_set=pa.array(allowed)))
