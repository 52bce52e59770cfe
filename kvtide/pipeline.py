"""The whole path in one process: a run's chunks through a local log and the plain loop into a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from analytics.fleet.chunks import Chunk
from ingest.batching import Batcher
from ingest.events import TOPIC
from ingest.locallog import LocalLog
from ingest.store import Store
from kvtide.emulation import publish
from streams.local import LocalResult, run_local
from streams.shard import ShardConfig


def run_embedded(
    chunks: Iterable[Chunk],
    store: Store,
    folder: Path,
    *,
    partitions: int = 4,
    config: ShardConfig | None = None,
    on_chunk: Callable[[Chunk], None] | None = None,
) -> LocalResult:
    """Publish `chunks` to a local log in `folder`, then work the log to its end into `store` (migrated first if need be).

    The same batcher, records and shards as with Kafka and Faust; only the carrier differs. Raises what the workers raise.
    """
    store.migrate()
    with LocalLog(folder, TOPIC, partitions) as log:
        publish(chunks, Batcher(log, partitions), on_chunk)
        return run_local(log, store, config or ShardConfig())
