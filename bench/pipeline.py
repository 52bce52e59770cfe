"""Records and rows per second through Kafka, Faust and ClickHouse, beside a bare confluent-kafka consume-and-decode of the same topic.

Three measurements of one topic, in this order: consume and decode only; consume, decode and apply to the shards, no store; and the whole
pipeline as `kvtide work` runs it, from its first record to the last checkpoint. The difference between the last two is what Faust and the
store cost; the difference between the first two is what the shards cost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ingest.batching import Batcher
from ingest.errors import KvtideError
from ingest.events import DLQ_TOPIC, SCHEMAS, TOPIC, Instance, Kind, decode
from ingest.kafka import KafkaReader, KafkaSink, end_offsets, ensure_topics
from ingest.store import Store
from kvtide.devkafka import start_kafka
from streams.app import AppConfig, Group
from streams.shard import Shard, ShardConfig

PARTITIONS = 8
MINUTES = 4
_T0_US = 1_700_000_000_000_000 // 60_000_000 * 60_000_000


def run(trace: str | None = None, limit: int | None = None, *, tenants: int = 40, seed: int = 1) -> dict[str, Any]:
    """Start a broker, publish `limit` (60,000) generated accesses with what they store, and measure; about half a minute.

    Runs in a process of its own, since an embedded engine opens one folder a process. Returns counts, records/s and rows/s of the three
    measurements, the ratio of the whole pipeline to the bare one, and producer MB/s. `trace` is not used.
    Raises `KvtideError` when Kafka cannot start.
    """
    command = [sys.executable, "-m", "bench.pipeline", str(limit or 60_000), str(tenants), str(seed)]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KvtideError(f"the pipeline benchmark failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(bootstrap: str, store_url: str, requests: int, tenants: int, seed: int) -> dict[str, Any]:
    """The measurements on a running broker and an empty store."""
    published = _publish(bootstrap, requests, tenants, seed)
    bare = _bare(bootstrap, published["records"], lambda partition, kind, batch, offset: None)
    shards = {partition: Shard(partition, ShardConfig()) for partition in range(PARTITIONS)}
    applied = _bare(bootstrap, published["records"], lambda partition, kind, batch, offset: shards[partition].apply(kind, batch, offset))
    whole = _whole(bootstrap, store_url, published["records"])
    return {
        "published": published,
        "bare_consume_decode": bare,
        "consume_decode_shard": applied,
        "kafka_faust_store": whole,
        "whole_over_bare_ratio": round(whole["rows_per_second"] / bare["rows_per_second"], 4),
        "whole_over_shard_ratio": round(whole["rows_per_second"] / applied["rows_per_second"], 4),
    }


def _publish(bootstrap: str, requests: int, tenants: int, seed: int) -> dict[str, Any]:
    ensure_topics(bootstrap, {TOPIC: PARTITIONS, DLQ_TOPIC: 1})
    rng = np.random.default_rng(seed)
    sink = KafkaSink(bootstrap, TOPIC)
    batcher = Batcher(sink, PARTITIONS)
    began, step = time.perf_counter(), MINUTES * 60  # one batch of a second of traffic: kinds stay in step within the linger
    for second, rows in enumerate(np.diff(np.linspace(0, requests, step + 1).astype(int))):
        for kind, batch in _traffic(rng, second, int(rows), tenants):
            batcher.add_batch(kind, batch)
    for instance in range(8):  # a heartbeat far behind the last row closes its window
        batcher.add(_heartbeat(instance, _T0_US + (step + 180) * 1_000_000, step + 180))
    batcher.flush()
    seconds = time.perf_counter() - began
    return {"records": batcher.records, "rows": batcher.rows, "rows_per_second": round(batcher.rows / seconds)}


def _traffic(rng: np.random.Generator, second: int, rows: int, tenants: int) -> list[tuple[Kind, pa.RecordBatch]]:
    """Accesses of one second with chains that share heads, and the residency rows of their last two blocks."""
    start = _T0_US + second * 1_000_000
    ts_us = np.sort(rng.integers(start, start + 1_000_000, rows))
    tenant, instance = rng.zipf(1.3, rows) % tenants, rng.integers(0, 8, rows)
    length = rng.integers(4, 48, rows)
    head = (rng.zipf(1.2, rows) % 500).astype(np.uint64) << np.uint64(20)
    ends = np.cumsum(length)
    position = np.arange(ends[-1] if rows else 0) - np.repeat(ends - length, length)
    blocks = np.repeat(head, length) + position.astype(np.uint64) + np.uint64(1 << 63)
    chain = pa.ListArray.from_arrays(pa.array(np.concatenate(([0], ends)), pa.int32()), pa.array(blocks, pa.uint64()))
    seq = second * 100_000 + np.arange(rows)
    place = {
        "source": pa.array(["bench"] * rows),
        "tenant": pa.array([f"tenant-{t:03d}" for t in tenant]),
        "model": pa.array(["m"] * rows),
        "instance": pa.array([f"p{i}" for i in instance]),
        "incarnation": pa.array(np.ones(rows), pa.uint64()),
    }
    access: dict[str, Any] = {
        **place,
        "ts_us": pa.array(ts_us),
        "seq": pa.array(seq, pa.uint64()),
        "request_id": pa.array([f"r{s}" for s in seq]),
        "prompt_tokens": pa.array(length * 16 + 5),
        "hit_tokens": pa.array(rng.integers(0, length) * 16),
        "block_size": pa.array(np.full(rows, 16), pa.int32()),
        "chain": chain,
        "prefill_ms": pa.array(rng.random(rows) * 100),
        "outcome": pa.array(["served"] * rows),
    }
    residency: dict[str, Any] = {
        **place,
        "ts_us": pa.array(ts_us),
        "seq": pa.array(seq + 50_000, pa.uint64()),
        "kind": pa.array(np.where(rng.random(rows) < 0.6, "stored", "evicted").tolist()),
        "block": pa.array(blocks[ends - 1], pa.uint64()),
        "block_size": access["block_size"],
        "position": pa.array(length - 1, pa.int32()),
        "tier": pa.array(["hbm"] * rows),
        "reason": pa.array(["pressure"] * rows),
    }
    return [("access", _batch("access", access, rows)), ("residency", _batch("residency", residency, rows))]


def _batch(kind: Kind, columns: dict[str, Any], rows: int) -> pa.RecordBatch:
    fields = SCHEMAS[kind]
    return pa.RecordBatch.from_arrays([columns.get(f.name, pa.nulls(rows, f.type)) for f in fields], names=fields.names)


def _heartbeat(instance: int, ts_us: int, seq: int) -> Instance:
    return Instance(
        ts_us=ts_us, source="fleet", seq=seq, instance=f"p{instance}", incarnation=1, lifecycle="heartbeat", capacity_blocks=4000
    )


def _bare(bootstrap: str, records: int, use: Callable[[int, Kind, pa.RecordBatch, int], object]) -> dict[str, Any]:
    """Consume the topic with confluent-kafka, decode, and hand each batch to `use`."""
    done = rows = 0
    with KafkaReader(bootstrap, TOPIC) as reader:
        began, cpu = 0.0, time.process_time()
        while done < records:
            batch = reader.read(1.0)
            began = began or time.perf_counter()
            for record in batch:
                kind, decoded, _ = decode(record.value, record.headers)
                use(record.partition, kind, decoded, record.offset)
                rows += decoded.num_rows
            done += len(batch)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    return _speed(records, rows, seconds, cpu)


def _whole(bootstrap: str, store_url: str, records: int) -> dict[str, Any]:
    with Store.open(store_url) as store:
        store.migrate()
    ends = end_offsets(bootstrap, TOPIC)
    config = AppConfig(
        bootstrap=bootstrap, open_store=lambda: Store.open(store_url), partitions=PARTITIONS, until_end=True, group="kvtide-bench"
    )
    started = time.perf_counter()
    with Group(config) as group:
        while not group.failed and not sum(stats.records for stats in group.stats()):
            time.sleep(0.005)
        began, cpu = time.perf_counter(), time.process_time()
        while not group.failed and sum(stats.checkpoint_offset for stats in group.stats()) < sum(ends.values()):
            time.sleep(0.005)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        stats = group.stats()
    group.raise_failure()
    rows = sum(item.rows for item in stats)
    return {
        **_speed(records, rows, seconds, cpu),
        "startup_seconds": round(began - started, 3),
        "windows": sum(item.windows for item in stats),
        "inserted_rows": sum(item.inserted_rows for item in stats),
        "checkpoints": sum(item.checkpoints for item in stats),
    }


def _speed(records: int, rows: int, seconds: float, cpu_seconds: float) -> dict[str, Any]:
    """Wall-clock rates, and the processor time of this process, which a busy machine does not stretch."""
    return {
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "records_per_second": round(records / seconds),
        "rows_per_second": round(rows / seconds),
    }


def main() -> None:
    """Measure on a broker and store of its own; the result is the last line on stdout."""
    requests, tenants, seed = (int(text) for text in sys.argv[1:4])
    with start_kafka() as kafka, tempfile.TemporaryDirectory(prefix="kvtide-bench-") as folder:
        print(json.dumps(measure(kafka.bootstrap, f"chdb://{folder}/store", requests, tenants, seed)), flush=True)


if __name__ == "__main__":
    main()
