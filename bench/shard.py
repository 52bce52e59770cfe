"""Shard throughput: packed access and residency records of a real agent trace through `Shard.apply`, beside a per-block Fenwick tree.

Both do exact stack distances of the same blocks in both scopes; the shard also orders rows, attributes causes and fills the windows. Each
is run once on a prefix before it is timed, so that nothing compiles inside the clock. Decoding the records is timed apart. All times are
processor seconds, of all threads: other processes on the machine then weigh on neither side.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from analytics.reuse.chains import densify
from analytics.reuse.olken import olken_distances
from analytics.reuse.run_exact import RunStack
from ingest.batching import Batcher
from ingest.errors import UsageError
from ingest.events import SCHEMAS, Record, decode
from ingest.sources import read_trace
from streams.shard import Shard

WEKA = Path(__file__).parent.parent.parent / "shared" / "traces" / "weka-claude-code" / "traces_710.tar.zst"
REQUEST_GAP_US = 100_000
GROUP = 256  # requests per contract batch handed to the batcher


class Records(list[Record]):
    """Sink that keeps records in memory."""

    def append(self, partition: int, record: Record) -> None:  # type: ignore[override]
        super().append(record)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def run(trace: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """Blocks per second of both on one trace (WEKA, 64-token blocks, unless `trace` names another of that format).

    Two jobs and two references, so four ratios, and none of them is the one: `accesses` is the trace as it is, from an instance that sends
    no residency (causes inferred); `with_residency` adds a store record for each new block, and with it the exact causes. The reference
    gets the same hashes (one hash table, then a Fenwick tree in both scopes), or, `one_scope_dense`, one tree on ids made dense outside
    the clock, which is less than the shard does.
    Raises `UsageError` when the trace is not there. Cost: some 4 GB for the whole archive and a minute or two.
    """
    path = Path(trace) if trace else WEKA
    if not path.exists():
        raise UsageError(f"{path} is not there; name a WEKA archive with --trace PATH")
    offsets, hashes, prompt = _load(path, limit)
    ts_us = np.arange(len(prompt), dtype=np.int64) * REQUEST_GAP_US
    records = _records(ts_us, offsets, hashes, prompt)
    begin = time.process_time()
    batches = [decode(record.value, record.headers)[:2] for record in records]
    decode_s = time.process_time() - begin
    access = [(kind, _mute(batch) if kind == "instance" else batch) for kind, batch in batches if kind != "residency"]
    for stream in (batches, access):
        _shard_seconds([*stream[: max(2, len(stream) // 50)], stream[-1]])
    densify(hashes[:1000])
    olken_distances(ts_us[:1], offsets[:2], np.arange(offsets[1], dtype=np.int32), int(offsets[1]) + 1)
    access_s, residency_s = _shard_seconds(access), _shard_seconds(batches)
    begin = time.process_time()
    ids, n_ids = densify(hashes)
    densify_s = time.process_time() - begin
    tree_s = _seconds(lambda: olken_distances(ts_us, offsets, ids, n_ids))
    blocks, reference_s = len(hashes), densify_s + 2 * tree_s
    return {
        "trace": path.name,
        "requests": len(prompt),
        "blocks": blocks,
        "stored_blocks": n_ids,
        "records": len(records),
        "shard_blocks_per_second": blocks / access_s,
        "shard_with_residency_blocks_per_second": blocks / residency_s,
        "decode_blocks_per_second": blocks / decode_s,
        "fenwick_blocks_per_second": blocks / reference_s,
        "fenwick_one_scope_dense_blocks_per_second": blocks / tree_s,
        "ratio_accesses": reference_s / access_s,
        "ratio_accesses_one_scope_dense": tree_s / access_s,
        "ratio_with_residency": reference_s / residency_s,
        "ratio_with_residency_one_scope_dense": tree_s / residency_s,
    }


def _load(path: Path, limit: int | None) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
    chains, prompt = [], []
    for request in read_trace([str(path)], "weka", order="time", limit=limit):
        chains.append(request.full_chain())
        prompt.append(request.prompt_tokens)
    offsets = np.concatenate(([0], np.cumsum([len(chain) for chain in chains]))).astype(np.int64)
    return offsets, np.concatenate(chains), np.array(prompt, np.int64)


def _records(ts_us: NDArray[np.int64], offsets: NDArray[np.int64], hashes: NDArray[np.uint64], prompt: NDArray[np.int64]) -> list[Record]:
    """What one instance with room for everything would publish: hits by an unbounded cache, a store for every new block."""
    runs = RunStack().touch(ts_us, offsets, hashes)
    cold = np.zeros(len(prompt), np.int64)
    is_cold = runs.distance < 0
    np.add.at(cold, runs.request[is_cold], runs.length[is_cold])
    hit_blocks = np.minimum(np.diff(offsets) - cold, np.maximum(prompt - 1, 0) // 64)
    sink = Records()
    batcher = Batcher(sink, 1)
    batcher.add_batch("instance", _batch("instance", 1, ts_us=[0], lifecycle="up", source_state="live", reports_residency=True))
    for begin in range(0, len(prompt), GROUP):
        rows = np.arange(begin, min(begin + GROUP, len(prompt)))
        span = slice(offsets[rows[0]], offsets[rows[-1] + 1])
        chain = pa.ListArray.from_arrays(
            pa.array((offsets[begin : rows[-1] + 2] - offsets[begin]).astype(np.int32)), pa.array(hashes[span])
        )
        batcher.add_batch(
            "access",
            _batch("access", len(rows), ts_us=ts_us[rows], seq=2 * rows, prompt_tokens=prompt[rows], hit_tokens=hit_blocks[rows] * 64,
                   block_size=64, chain=chain, prefill_ms=10.0, outcome="served"),
        )  # fmt: skip
        position = np.concatenate([np.arange(offsets[r + 1] - offsets[r] - cold[r], offsets[r + 1] - offsets[r]) for r in rows])
        owner = np.repeat(rows, cold[rows])
        batcher.add_batch(
            "residency",
            _batch("residency", len(owner), ts_us=ts_us[owner], seq=2 * owner + 1, block=hashes[offsets[owner] + position], block_size=64,
                   position=position, kind="stored", tier="hbm"),
        )  # fmt: skip
    end = int(ts_us[-1]) + 180_000_000
    batcher.flush()
    batcher.add_batch("instance", _batch("instance", 1, ts_us=[end], lifecycle="heartbeat", source_state="live", reports_residency=True))
    batcher.flush()
    return list(sink)


def _mute(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Instance rows of an engine that sends no residency."""
    return batch.set_column(batch.schema.get_field_index("reports_residency"), SCHEMAS["instance"].field("reports_residency"),
                            pa.array([False] * batch.num_rows))  # fmt: skip


def _batch(kind_: Any, n: int, **given: Any) -> pa.RecordBatch:
    """Contract batch of `n` rows: scalars repeat, what is not given is null or, where null is not allowed, 1 or a name."""
    columns = {}
    for field in SCHEMAS[kind_]:
        value = given.get(field.name)
        if value is None:
            value = None if field.nullable else "weka" if pa.types.is_string(field.type) else 1
        if isinstance(value, pa.Array):
            columns[field.name] = value.cast(field.type)
        elif isinstance(value, (list, np.ndarray)):
            columns[field.name] = pa.array(value).cast(field.type)
        else:
            columns[field.name] = pa.array([value] * n, field.type)
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMAS[kind_])


def _shard_seconds(batches: Sequence[tuple[Any, pa.RecordBatch]]) -> float:
    shard = Shard(0)

    def work() -> None:
        for offset, (kind, batch) in enumerate(batches):
            shard.apply(kind, batch, offset)

    return _seconds(work)


def _seconds(work: Any) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin
