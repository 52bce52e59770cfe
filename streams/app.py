"""The Faust application: a consumer group member that carries records to partition workers. The only importer of faust.

Faust acknowledges what a handler failed on, restarts agents that raise, and while it stops it drains its buffers, acknowledging all of
them (after `noack_take` too). Each would lose records. So its acknowledgements are off; exactly the offsets that checkpoints hold are
committed here, and any exception stops the process for its supervisor to start again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import faust
from mode import CrashingSupervisor

from ingest.errors import KvtideError
from ingest.events import DLQ_TOPIC, TOPIC
from ingest.kafka import KafkaSink, committed_offsets, end_offsets, ensure_topics, start_offsets, topic_id
from streams.shard import Shard, ShardConfig
from streams.worker import PartitionWorker, ShardFactory, Stats, StorePort

_TAKE = 64  # records a step: a step holds the lock that checkpoints and rebalances wait for
_WITHIN_S = 0.1
_TICK_S = 0.1
_STOP_S = 30.0
_log = logging.getLogger("kvtide.app")


@dataclass(frozen=True, kw_only=True)
class AppConfig:
    """One consumer group on one topic. `open_store` is called once by each member, in the thread that will use the store.

    `session_timeout_s` is how long the group waits for a dead member before others (or its restart) get its partitions.
    """

    bootstrap: str
    open_store: Callable[[], StorePort]
    topic: str = TOPIC
    group: str = "kvtide"
    partitions: int = 16
    shard: ShardConfig = ShardConfig()
    checkpoint_s: float = 5.0
    dlq_ratio: float = 0.5
    session_timeout_s: float = 8.0
    until_end: bool = False
    skip_missing: bool = False
    shard_factory: ShardFactory = Shard


class _App(faust.App):
    def _create_directories(self) -> None:
        """Nothing is kept on disk, so no data folder either."""


def build_app(config: AppConfig) -> faust.App:
    """Faust application without tables, windows, web server, or topics of its own; it fails rather than restarts an agent."""
    return _App(
        config.group,
        broker=[f"kafka://{address.strip()}" for address in config.bootstrap.split(",")],
        version=1,
        store="memory://",
        processing_guarantee="at_least_once",
        agent_supervisor=CrashingSupervisor,
        topic_allow_declare=False,
        topic_disable_leader=True,
        topic_partitions=config.partitions,
        consumer_auto_offset_reset="earliest",
        key_serializer="raw",
        value_serializer="raw",
        web_enabled=False,
        broker_session_timeout=config.session_timeout_s,
        broker_heartbeat_interval=config.session_timeout_s / 4,
        broker_max_poll_records=_TAKE * 4,
        stream_buffer_maxsize=_TAKE * 4,
        stream_wait_empty=False,
        autodiscover=False,
    )


class Member:
    """One member of the group: a thread with its own event loop, Faust app, store connection and workers.

    Faust's loop only moves events; the workers run in a pool of one thread, so that heartbeats and rebalances go on meanwhile.
    """

    def __init__(self, config: AppConfig, log_id: str, ends: dict[int, int]) -> None:
        self._config, self._log_id, self._ends = config, log_id, ends
        self._workers: dict[int, PartitionWorker] = {}
        self._committed: dict[int, int] = {}
        self._retired: list[Stats] = []
        self._edges: tuple[int, dict[int, int], dict[int, int]] = (-1, {}, {})  # generation, log starts, log ends
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvtide-worker")
        self._stop = threading.Event()
        self.assigned: frozenset[int] = frozenset()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="kvtide-member", daemon=True)

    def stop(self) -> None:
        """Ask for an orderly end: checkpoint, commit, leave the group. Returns at once."""
        self._stop.set()

    def stats(self) -> list[Stats]:
        """Counters of all workers of this member, past ones too."""
        return self._retired + [worker.stats for worker in list(self._workers.values())]

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._main())
        except BaseException as error:
            self._fail(error)
        finally:
            self._pool.shutdown(wait=False)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._stop.set()

    async def _main(self) -> None:
        self._loop, self._lock = asyncio.get_running_loop(), asyncio.Lock()
        self._store, self._dlq = await self._loop.run_in_executor(self._pool, self._open)
        self._app = build_app(self._config)
        self._define(self._app)
        await self._app.start()
        try:
            while not self._stop.is_set():
                await asyncio.sleep(_TICK_S)
                if self._app.crashed or self._app.should_stop:
                    raise KvtideError(f"Faust stopped: {self._app.crash_reason!r}; see the log above, then start the worker again")
                await self._checkpoint(self._due)
            if self.failure is None:
                await self._checkpoint(lambda worker: True)
        except Exception as error:
            self._fail(error)
        finally:
            await self._app.stop()
            await self._loop.run_in_executor(self._pool, self._close)

    def _open(self) -> tuple[StorePort, KafkaSink]:
        return self._config.open_store(), KafkaSink(self._config.bootstrap, DLQ_TOPIC)

    def _close(self) -> None:
        close = getattr(self._store, "close", None)
        if close is not None:
            close()

    def _define(self, app: faust.App) -> None:
        topic = app.topic(self._config.topic, key_serializer="raw", value_serializer="raw", allow_empty=True, acks=False)

        @app.agent(topic, concurrency=1, supervisor_strategy=CrashingSupervisor, name="shards")
        async def shards(stream: Any) -> None:
            async for events in stream.noack_take(_TAKE, within=_WITHIN_S):
                try:
                    await self._take(events)
                except Exception as error:
                    self._fail(error)
                    raise

        @app.on_partitions_revoked.connect
        async def revoked(*_: Any, **__: Any) -> None:
            try:
                await self._release()
            except Exception as error:
                self._fail(error)

        @app.on_partitions_assigned.connect
        async def assigned(*args: Any, **_: Any) -> None:
            self.assigned = frozenset(place.partition for place in args[1])

    async def _take(self, events: Sequence[Any]) -> None:
        async with self._lock:
            if self._stop.is_set():
                return
            generation = self._app.consumer_generation_id
            # what an earlier generation fetched comes again from the committed offset
            current = [event for event in events if event.message.generation_id == generation]
            await self._loop.run_in_executor(self._pool, self._apply, current, generation)

    def _apply(self, events: Sequence[Any], generation: int) -> None:
        for event in events:
            message = event.message
            worker = self._workers.get(message.partition) or self._start(message.partition, generation)
            worker.handle(message.offset, dict(message.headers or ()), message.value or b"")
            if worker.due(time.time()):
                worker.checkpoint()

    def _start(self, partition: int, generation: int) -> PartitionWorker:
        if self._edges[0] != generation:
            where = (self._config.bootstrap, self._config.topic)
            self._edges = (generation, start_offsets(*where), end_offsets(*where))
        config = self._config
        worker = PartitionWorker(
            partition,
            config.topic,
            self._store,
            config.shard,
            self._dlq,
            time.time,
            config.checkpoint_s,
            config.shard_factory,
            dlq_ratio=config.dlq_ratio,
            log_id=self._log_id,
            skip_missing=config.skip_missing,
        )
        worker.start(self._edges[1][partition], self._edges[2][partition])
        self._workers[partition] = worker
        return worker

    def _due(self, worker: PartitionWorker) -> bool:
        at_end = self._config.until_end and worker.next_offset >= self._ends.get(worker.partition, 0)
        return worker.dirty and (at_end or worker.due(time.time()))

    async def _checkpoint(self, wanted: Callable[[PartitionWorker], bool]) -> None:
        """Checkpoint the workers that want it, then commit the offsets that the newest checkpoints hold."""
        async with self._lock:
            ripe = [worker for worker in self._workers.values() if wanted(worker)]
            if ripe:
                await self._loop.run_in_executor(self._pool, lambda: [worker.checkpoint() for worker in ripe])
            held = {worker.partition: worker.stats.checkpoint_offset for worker in self._workers.values()}
            news = {partition: offset for partition, offset in held.items() if offset > self._committed.get(partition, 0)}
            self._committed.update(await self._commit(news))

    async def _commit(self, news: dict[int, int]) -> dict[int, int]:
        """Commit what is still assigned here; returns it. Nothing in a rebalance: who gets the partition skips what its checkpoint holds.

        Runs in Faust's consumer thread, where nothing comes between the look at the assignment and the commit. Faust itself filters too,
        but crashes when nothing is left.
        """
        consumer: Any = self._app.consumer
        thread = consumer._thread

        async def commit() -> dict[int, int]:
            mine = {tp: news[tp.partition] for tp in thread.assignment() if tp.topic == self._config.topic and tp.partition in news}
            return {tp.partition: offset for tp, offset in mine.items()} if mine and await thread._commit(mine) else {}

        return await thread.call_thread(commit) if news else {}

    async def _release(self) -> None:
        """Partitions may go to another member: leave a checkpoint of all, and forget everything. Who gets them restores it."""
        async with self._lock:
            self.assigned = frozenset()
            workers, self._workers = list(self._workers.values()), {}
            self._committed.clear()
            self._retired += [worker.stats for worker in workers]
            await self._loop.run_in_executor(self._pool, lambda: [worker.checkpoint() for worker in workers])


class Group:
    """Group members as threads of one process, each with its own loop and store connection; a context manager that stops them."""

    def __init__(self, config: AppConfig, members: int = 1) -> None:
        """Creates the topic and kv.dlq when absent. Raises `UsageError` for another partition count."""
        ensure_topics(config.bootstrap, {config.topic: config.partitions, DLQ_TOPIC: 1})
        self._config = config
        self._ends = end_offsets(config.bootstrap, config.topic)
        self._starts = start_offsets(config.bootstrap, config.topic)
        log_id = topic_id(config.bootstrap, config.topic)
        self.members = [Member(config, log_id, self._ends) for _ in range(members)]

    def __enter__(self) -> Group:
        for member in self.members:
            member.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stop()
        for member in self.members:
            member.thread.join(_STOP_S)

    @property
    def failed(self) -> bool:
        """Whether a member has ended or failed."""
        return any(not member.thread.is_alive() or member.failure is not None for member in self.members)

    def done(self) -> bool:
        """Whether the group, in whatever processes, has committed all that the topic held when this object was made."""
        config = self._config
        committed = committed_offsets(config.bootstrap, config.group, config.topic)
        return all(committed.get(partition, self._starts[partition]) >= end for partition, end in self._ends.items())

    def stats(self) -> list[Stats]:
        """Counters of all workers, past ones too."""
        return [stats for member in self.members for stats in member.stats()]

    def raise_failure(self) -> None:
        """Raise the first failure of a member, or `KvtideError` for one that does not end."""
        for member in self.members:
            if member.failure is not None:
                raise member.failure
        if any(member.thread.is_alive() for member in self.members):
            raise KvtideError(f"a worker did not stop within {_STOP_S:g} s; nothing is lost, start it again")


def run_workers(
    config: AppConfig,
    members: int = 1,
    *,
    progress: Callable[[list[Stats]], None] | None = None,
    stop: threading.Event | None = None,
) -> list[Stats]:
    """Run group members until a signal, `stop`, or (with `until_end`) the end of the topic as it is now; returns all counters.

    SIGTERM and SIGINT end in order: checkpoint, commit, leave the group. The first failure of a member stops all and is raised.
    With `until_end` the group has committed everything up to the end on return, whichever processes did the work.
    """
    stop = stop or threading.Event()
    with _signals(stop):
        with Group(config, members) as group:
            while not stop.wait(0.3) and not group.failed and not (config.until_end and group.done()):
                if progress is not None:
                    progress(group.stats())
        group.raise_failure()
    if progress is not None:
        progress(group.stats())
    return group.stats()


@contextmanager
def _signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` meanwhile, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
