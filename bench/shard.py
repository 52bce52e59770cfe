"""Shard throughput: packed access and residency records of a real agent trace through `Shard.apply`, beside a per-block Fenwick tree.

Both do exact stack distances of the same blocks; the shard also decodes the records, orders rows, attributes causes, keeps a placed stack
beside the fleet's and fills the windows. Each is run once on a prefix before it is timed, so that nothing compiles inside the clock.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

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


def run(trace: str | None = None, limit: int | None = None, **_: object) -> dict[str, Any]:
    """Blocks per second of both on one trace (WEKA, 64-token blocks, unless `trace` names another of that format).

    Raises `UsageError` when the trace is not there. Cost: about 1 GB for the whole archive and a minute of reading and timing.
    """
    path = Path(trace) if trace else WEKA
    if not path.exists():
        raise UsageError(f"{path} is not there; name a WEKA archive with --trace PATH")
    offsets, hashes, prompt = _load(path, limit)
    ts_us = np.arange(len(prompt), dtype=np.int64) * REQUEST_GAP_US
    records = _records(ts_us, offsets, hashes, prompt)
    _shard_seconds(records[: max(2, len(records) // 50)])
    shard_s = _shard_seconds(records)
    _, ids = np.unique(hashes, return_inverse=True)
    dense, n_ids = ids.astype(np.int32), int(ids.max()) + 1
    few = int(np.searchsorted(offsets, min(len(hashes), 100_000)))
    olken_distances(ts_us[:few], offsets[: few + 1], dense[: offsets[few]], n_ids)
    fenwick_s = _seconds(lambda: olken_distances(ts_us, offsets, dense, n_ids))
    blocks = len(hashes)
    return {
        "trace": path.name,
        "requests": len(prompt),
        "blocks": blocks,
        "records": len(records),
        "shard_blocks_per_second": blocks / shard_s,
        "fenwick_blocks_per_second": blocks / fenwick_s,
        "ratio": fenwick_s / shard_s,
    }


def _load(path: Path, limit: int | None) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.int64]]:
    chains, prompt = [], []
    for request in read_trace([str(path)], "weka", order="session", limit=limit):
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


def _shard_seconds(records: list[Record]) -> float:
    shard = Shard(0)

    def work() -> None:
        for offset, record in enumerate(records):
            kind, batch, _ = decode(record.value, record.headers)
            shard.apply(kind, batch, offset)

    return _seconds(work)


def _seconds(work: Any) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
