"""Joining the emulator to the event contract: traces become workloads, emulated chunks become contract batches in an event log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from analytics.fleet import chunks as fleet
from analytics.fleet.chunks import Chunk
from analytics.fleet.workload import Workload
from ingest.batching import Batcher
from ingest.errors import UsageError
from ingest.events import KINDS, SCHEMAS, Kind
from ingest.sources.base import TraceRequest

CHUNK_S = 2.0  # of event time: below the shards' grace, so that a replay has no late rows


def workload_from_trace(requests: Iterable[TraceRequest], name: str) -> Workload:
    """Workload of a trace's requests: full blocks only, arrivals counted from the first request, tenants as the reader named them.

    Raises `UsageError` when the trace has no blocks, blocks of unequal length, or several block sizes. Cost: the trace in memory.
    """
    rows = sorted(requests, key=lambda request: request.arrived_at_s)
    if not rows:
        raise UsageError(f"{name} holds no requests: nothing to emulate")
    sizes = {request.block_size for request in rows}
    if len(sizes) > 1 or any(request.block_tokens is not None for request in rows):
        raise UsageError(f"{name} has blocks of unequal length: re-cut them with --block-size N")
    if not any(len(request.chain) for request in rows):
        raise UsageError(f"{name} has no block hashes: a cache cannot be emulated from it; choose a trace with blocks")
    chains = [request.full_chain() for request in rows]
    tenant, tenants = _coded([request.tenant for request in rows])
    session, sessions = _coded([request.session for request in rows])
    category, categories = _coded([request.category for request in rows])
    start_s = rows[0].arrived_at_s
    return Workload(
        arrived_at_us=np.array([round((request.arrived_at_s - start_s) * 1e6) for request in rows], np.int64),
        tenant=tenant,
        tenants=tenants,
        prompt_tokens=np.array([request.prompt_tokens for request in rows], np.int64),
        output_tokens=np.array([request.output_tokens or 0 for request in rows], np.int64),
        block_size=sizes.pop(),
        offsets=np.cumsum([0, *(len(chain) for chain in chains)], dtype=np.int64),
        hashes=np.concatenate(chains).astype(np.uint64),
        session=session,
        sessions=sessions,
        category=category,
        categories=categories,
        turn=np.array([request.turn or 0 for request in rows], np.int32),
        model=rows[0].model,
        request_ids=tuple(request.request_id or f"r{i}" for i, request in enumerate(rows)),
        origin=f"trace {name}" + (" (tenants assigned)" if any(request.tenant_assigned for request in rows) else ""),
    )


def _coded(values: Sequence[str | None]) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Codes into the distinct values in order of appearance, -1 for None."""
    names = {name: code for code, name in enumerate(dict.fromkeys(value for value in values if value is not None))}
    return np.array([-1 if value is None else names[value] for value in values], np.int32), tuple(names)


def publish(chunks: Iterable[Chunk], batcher: Batcher, progress: Callable[[Chunk], None] | None = None) -> dict[Kind, int]:
    """Send a run's chunks through a batcher, one cut per chunk, and flush. Returns the rows sent per kind."""
    sent: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for chunk in chunks:
        for kind, batch in contract_batches(chunk):
            batcher.add_batch(kind, batch)
            sent[kind] += batch.num_rows
        batcher.advance(chunk.to_us / 1e6 + CHUNK_S)
        if progress:
            progress(chunk)
    batcher.flush()
    return sent


def contract_batches(chunk: Chunk) -> list[tuple[Kind, pa.RecordBatch]]:
    """A chunk's rows as batches of the event contract, kinds in the contract's order."""
    columns = {"access": _access(chunk), "residency": _residency(chunk), "instance": _instance(chunk)}
    return [(kind, pa.RecordBatch.from_pydict(columns[kind], schema=SCHEMAS[kind])) for kind in KINDS]


def _access(chunk: Chunk) -> dict[str, pa.Array]:
    rows, words, n = chunk.access, chunk.vocabulary, len(chunk.access.ts_us)
    chain = pa.ListArray.from_arrays(pa.array(rows.offsets, pa.int32()), pa.array(rows.hashes, pa.uint64()))
    unknown = {name: pa.nulls(n, SCHEMAS["access"].field(name).type) for name in ("parent_session", "hit_dram_tokens", "hit_disk_tokens")}
    return {
        **_order(rows.ts_us, rows.seq, words.source),
        **_place(rows, words),
        **unknown,
        "request_id": pa.array(rows.request_id, pa.string()),
        "session": _names(words.sessions, rows.session),
        "category": _names(words.categories, rows.category),
        "turn": pa.array(rows.turn, pa.int32(), mask=rows.turn == 0),
        "prompt_tokens": pa.array(rows.prompt_tokens),
        "hit_tokens": pa.array(rows.hit_tokens),
        "block_size": _same(words.block_size, n, pa.int32()),
        "chain": chain.cast(SCHEMAS["access"].field("chain").type),
        "output_tokens": pa.array(rows.output_tokens),
        **{name: _known(getattr(rows, name)) for name in ("queue_ms", "prefill_ms", "ttft_ms")},
        "router": _names(words.routers, rows.router),
        "outcome": _names(fleet.OUTCOMES, rows.outcome),
    }


def _residency(chunk: Chunk) -> dict[str, pa.Array]:
    rows, words, n = chunk.residency, chunk.vocabulary, len(chunk.residency.ts_us)
    return {
        **_order(rows.ts_us, rows.seq, words.source),
        **_place(rows, words),
        "kind": _names(fleet.RESIDENCY_KINDS, rows.kind),
        "block": pa.array(rows.block, pa.uint64()),
        "block_size": _same(words.block_size, n, pa.int32()),
        "position": pa.array(rows.position, pa.int32()),
        "tier": _same("hbm", n, pa.string()),
        "reason": _names(("", *fleet.REASONS[1:]), np.where(rows.reason > 0, rows.reason, -1)),
        "cause_tenant": _names(words.tenants, rows.cause_tenant),
        "idle_ms": _known(rows.idle_ms),
    }


def _instance(chunk: Chunk) -> dict[str, pa.Array]:
    rows, words, n = chunk.instance, chunk.vocabulary, len(chunk.instance.ts_us)
    counted = ("capacity_blocks", "used_blocks", "pinned_blocks", "evictable_blocks", "queued_tokens", "query_tokens", "hit_tokens")
    return {
        **_order(rows.ts_us, rows.seq, words.source),
        "instance": _names(words.instances, rows.instance),
        "incarnation": pa.array(rows.incarnation).cast(pa.uint64()),
        "lifecycle": _names(fleet.LIFECYCLES, rows.lifecycle),
        "reason": _names(fleet.LIFECYCLE_REASONS, np.where(rows.reason > 0, rows.reason, -1)),
        **{name: pa.array(getattr(rows, name)) for name in counted},
        **{name: pa.array(getattr(rows, name)).cast(pa.int32()) for name in ("running", "waiting")},
        "source_state": _same("live", n, pa.string()),
        "reports_residency": _same(True, n, pa.bool_()),
    }


def _order(ts_us: NDArray[np.int64], seq: NDArray[np.int64], source: str) -> dict[str, pa.Array]:
    return {"ts_us": pa.array(ts_us), "source": _same(source, len(ts_us), pa.string()), "seq": pa.array(seq.astype(np.uint64))}


def _place(rows: fleet.AccessColumns | fleet.ResidencyColumns, words: fleet.Vocabulary) -> dict[str, pa.Array]:
    return {
        "tenant": _names(words.tenants, rows.tenant),
        "model": _same(words.model, len(rows.ts_us), pa.string()),
        "instance": _names(words.instances, rows.instance),
        "incarnation": pa.array(rows.incarnation).cast(pa.uint64()),
    }


def _names(words: Sequence[str], codes: NDArray[np.integer]) -> pa.Array:
    """Strings of codes; -1 becomes null."""
    index = pa.array(codes.astype(np.int64), mask=codes < 0)
    return pa.array([*words, ""], pa.string()).take(index)


def _same(value: object, n: int, type_: pa.DataType) -> pa.Array:
    return pa.array([value], type_).take(pa.array(np.zeros(n, np.int64)))


def _known(values: NDArray[np.float64]) -> pa.Array:
    """Floats with NaN as null."""
    return pa.array(values, pa.float64(), mask=np.isnan(values))
