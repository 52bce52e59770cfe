"""The plain loop: one process, one local log, the same workers as under Faust."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from ingest.events import DLQ_TOPIC
from ingest.locallog import LocalLog
from streams.shard import Shard, ShardConfig
from streams.worker import DeadLetterPort, PartitionWorker, ShardFactory, Stats, StorePort


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What `run_local` did, by partition."""

    stats: dict[int, Stats] = field(default_factory=dict)

    def total(self, name: str) -> int:
        """Sum of one counter over the partitions."""
        return sum(getattr(stats, name) for stats in self.stats.values())


def run_local(
    log: LocalLog,
    store: StorePort,
    config: ShardConfig,
    *,
    dlq: DeadLetterPort | None = None,
    partitions: Iterable[int] | None = None,
    until_end: bool = True,
    progress: Callable[[dict[int, Stats]], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
    wait: Callable[[float], None] = time.sleep,
    checkpoint_s: float = 5.0,
    dlq_ratio: float = 0.5,
    skip_missing: bool = False,
    shard_factory: ShardFactory = Shard,
) -> LocalResult:
    """Carry records of a local log to one worker per partition, with checkpoints; bad ones go to `dlq` (None: topic kv.dlq beside the log).

    With `until_end` it returns when everything that was in the log at the start is applied and checkpointed; otherwise it follows the log
    until `stop()` says so. Raises what the workers raise, without a checkpoint after the failure. Cost: O(bytes) plus the shards' work.
    """
    with ExitStack() as stack:
        letters = stack.enter_context(LocalLog(log.folder, DLQ_TOPIC, 1)) if dlq is None else dlq
        limits: dict[str, Any] = {"dlq_ratio": dlq_ratio, "log_id": log.log_id, "skip_missing": skip_missing}
        mine = range(log.partitions) if partitions is None else partitions
        workers = [PartitionWorker(p, log.topic, store, config, letters, clock, checkpoint_s, shard_factory, **limits) for p in mine]
        for worker in workers:
            worker.start(log.start_offset(worker.partition), log.end_offset(worker.partition))
        result = LocalResult({worker.partition: worker.stats for worker in workers})
        while not stop():
            moved = sum(_carry(log, worker, clock, stop) for worker in workers)
            if progress is not None:
                progress(result.stats)
            if until_end:
                break
            if not moved:
                wait(0.1)
                log.refresh()
            _checkpoint(worker for worker in workers if worker.due(clock()))
        _checkpoint(workers)
    if progress is not None:
        progress(result.stats)
    return result


def _checkpoint(workers: Iterable[PartitionWorker]) -> None:
    for worker in workers:
        worker.checkpoint()


def _carry(log: LocalLog, worker: PartitionWorker, clock: Callable[[], float], stop: Callable[[], bool]) -> int:
    """Apply what the partition holds now; returns the number of records."""
    before = worker.next_offset
    worker.stats.end_offset = log.end_offset(worker.partition)
    for record in log.read(worker.partition, before):
        worker.handle(record.offset, record.headers, record.value)
        if worker.due(clock()):
            worker.checkpoint()
        if stop():
            break
    return worker.next_offset - before
