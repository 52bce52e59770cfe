"""`kvtide work`: consume events, write windows; Faust when Kafka is set, else the plain loop over a local log."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

import click

from ingest.errors import KvtideError, UsageError
from ingest.store import Store
from kvtide.settings import Settings
from streams.worker import Stats


class ProgressLine:
    """One line on stderr, rewritten on a terminal and printed every few seconds elsewhere."""

    def __init__(self, every_s: float) -> None:
        self._every_s, self._at, self._began = every_s, 0.0, time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, stats: Iterable[Stats]) -> None:
        now = time.monotonic()
        if now - self._at < (0.2 if self._terminal else self._every_s):
            return
        self._at = now
        sums = totals(stats)
        bad, late = sums["bad_rows"] + sums["bad_records"], sums["late_rows"]
        line = (
            f"{now - self._began:6.1f} s  {sums['records']} records  {sums['rows']} rows  {sums['windows']} windows  "
            f"{sums['checkpoints']} checkpoints  lag {sums['lag']}  bad {bad}  late {late}"
        )
        click.echo(f"\r{line}\x1b[K" if self._terminal else line, err=True, nl=not self._terminal)

    def end(self) -> None:
        """Leave the last line on the terminal."""
        if self._terminal:
            click.echo(err=True)


def totals(stats: Iterable[Stats]) -> dict[str, int]:
    """Sums of the counters over workers; offsets are left out, since their sums mean nothing."""
    sums = {name: 0 for name in Stats().as_dict() if not name.endswith("_offset")}
    for item in stats:
        for name in sums:
            sums[name] += item.as_dict()[name]
    return sums


@click.command()
@click.option("--kafka", metavar="HOST:PORT", help="Bootstrap servers; runs under Faust in group KVTIDE_GROUP.")
@click.option("--log", metavar="FOLDER", help="Local event log; used when no Kafka is set.")
@click.option("--store", metavar="URL", help="chdb://FOLDER or http(s)://user:pw@host:port/db.")
@click.option("--topic", metavar="NAME", help="Event topic.  [default: kv.events]")
@click.option("--group", metavar="NAME", help="Consumer group.  [default: kvtide]")
@click.option("--partitions", type=click.IntRange(1), help="Partitions of the topic when it is created, checked when it exists.")
@click.option("--checkpoint-s", type=click.FloatRange(0.0), help="Seconds between checkpoints.  [default: 5]")
@click.option("--until-end", is_flag=True, help="Stop when everything that is in the log now is applied and checkpointed.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Group members in this process (Kafka).")
@click.option("--session-timeout-s", type=click.FloatRange(0.5), default=8.0, show_default=True, help="Until a dead member is replaced.")
@click.option("--skip-missing", is_flag=True, help="Go on without records that the log no longer holds; they become dead letters.")
@click.option("--json", "as_json", is_flag=True, help="Print the counters as one JSON document on stdout.")
@click.option("--verbose", is_flag=True, help="Show what Faust and the Kafka client log.")
def command(
    kafka: str | None,
    log: str | None,
    store: str | None,
    topic: str | None,
    group: str | None,
    partitions: int | None,
    checkpoint_s: float | None,
    until_end: bool,
    workers: int,
    session_timeout_s: float,
    skip_missing: bool,
    as_json: bool,
    verbose: bool,
) -> None:
    """Consume events and write windows, causes and curves to the store.

    Stop it with Ctrl-C or SIGTERM: it makes a checkpoint first. Killed at any point, it goes on from its last checkpoint without losing
    or doubling a row.
    """
    _logging(verbose)
    if kafka is not None and log is not None:
        raise UsageError("--kafka and --log exclude each other; give the one that holds the events")
    given: dict[str, object] = {"store": store, "topic": topic, "group": group, "partitions": partitions, "checkpoint_s": checkpoint_s}
    settings = Settings.from_env(os.environ, **given, kafka="" if log is not None else kafka, log=log)
    with Store.open(settings.store, create=True) as opened:
        opened.migrate()
    line = ProgressLine(every_s=1.0)
    if settings.kafka:
        stats = _work_kafka(settings, line, until_end, workers, session_timeout_s, skip_missing)
    else:
        stats = _work_local(settings, line, until_end, skip_missing, partitions)
    line.end()
    sums = totals(stats)
    if as_json:
        click.echo(json.dumps(sums))
    else:
        bad = sums["bad_rows"] + sums["bad_records"]
        click.echo(f"{sums['records']} records, {sums['rows']} rows, {sums['windows']} windows, {bad} bad, lag {sums['lag']}", err=True)
    if sums["late_rows"] > sums["rows"] // 10:
        click.echo(
            f"kvtide: {sums['late_rows']} of {sums['rows']} rows were late: their times lie before what the same partition had seen. "
            "Two loads in one log, or a source whose clock is behind? Give each load a log and a store of its own, or raise KVTIDE_GRACE_S",
            err=True,
        )


def _work_kafka(
    settings: Settings, progress: Callable[[Iterable[Stats]], None], until_end: bool, workers: int, session_timeout_s: float, skip: bool
) -> list[Stats]:
    from ingest.kafka import check
    from streams.app import AppConfig, run_workers
    from streams.shard import ShardConfig

    check(settings.kafka)
    config = AppConfig(
        bootstrap=settings.kafka,
        open_store=lambda: Store.open(settings.store),
        topic=settings.topic,
        group=settings.group,
        partitions=settings.partitions,
        shard=ShardConfig(grace_us=round(settings.grace_s * 1e6)),
        checkpoint_s=settings.checkpoint_s,
        dlq_ratio=settings.dlq_ratio,
        session_timeout_s=session_timeout_s,
        until_end=until_end,
        skip_missing=skip,
    )
    try:
        return run_workers(config, workers, progress=progress)
    except KvtideError as error:
        _exit_hard_if_stuck(error)
        raise


def _exit_hard_if_stuck(error: KvtideError) -> None:
    """A client thread that does not end would keep the process, and its partitions, alive without work."""
    if any(not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()):
        click.echo(f"kvtide: {error}", err=True)
        sys.stderr.flush()
        os._exit(2 if isinstance(error, UsageError) else 1)


def _work_local(
    settings: Settings, progress: Callable[[Iterable[Stats]], None], until_end: bool, skip: bool, partitions: int | None
) -> list[Stats]:
    from ingest.locallog import LocalLog
    from streams.local import run_local
    from streams.shard import ShardConfig

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Store.open(settings.store) as store, LocalLog(settings.log, settings.topic, partitions, read_only=True) as log:
        result = run_local(
            log,
            store,
            ShardConfig(grace_us=round(settings.grace_s * 1e6)),
            until_end=until_end,
            progress=lambda stats: progress(stats.values()),
            stop=stop.is_set,
            checkpoint_s=settings.checkpoint_s,
            dlq_ratio=settings.dlq_ratio,
            skip_missing=skip,
        )
    return list(result.stats.values())


def _logging(verbose: bool) -> None:
    logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO if verbose else logging.WARNING)
    for name in ("faust", "mode", "aiokafka", "asyncio"):
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.CRITICAL)
