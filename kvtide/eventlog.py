"""Opening the event log that a command writes to: Kafka when it is named, else the local log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ingest.batching import EventSink
from ingest.errors import UsageError
from ingest.events import DLQ_TOPIC
from ingest.locallog import LocalLog
from kvtide.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])


def log_options(command: F) -> F:
    """--kafka, --log, --topic and --partitions, for a command that publishes events."""
    for option in reversed(
        (
            click.option("--kafka", metavar="HOST:PORT", help="Publish to Kafka at these bootstrap servers.  [default: KVTIDE_KAFKA]"),
            click.option("--log", metavar="FOLDER", help="Publish to a local log in this folder.  [default: KVTIDE_LOG]"),
            click.option("--topic", metavar="NAME", help="Event topic.  [default: kv.events]"),
            click.option("--partitions", type=click.IntRange(1), help="Partitions of the topic if it is created.  [default: 16]"),
        )
    ):
        command = option(command)
    return command


def log_settings(kafka: str | None, log: str | None, topic: str | None, partitions: int | None) -> Settings:
    """Settings with a command's options on top. Raises `UsageError` when both carriers are named."""
    if kafka is not None and log is not None:
        raise UsageError("--kafka and --log exclude each other; give the one that is to hold the events")
    return Settings.from_env(kafka="" if log is not None else kafka, log=log, topic=topic, partitions=partitions)


def open_sink(settings: Settings) -> EventSink:
    """The sink that `settings` names; topics are created as needed. Raises `UsageError` for another number of partitions."""
    if not settings.kafka:
        return LocalLog(settings.log, settings.topic, settings.partitions)
    from ingest.kafka import KafkaSink, check, ensure_topics

    check(settings.kafka)
    ensure_topics(settings.kafka, {settings.topic: settings.partitions, DLQ_TOPIC: 1})
    return KafkaSink(settings.kafka, settings.topic)


def refuse_used(settings: Settings) -> None:
    """Raise `UsageError` when the log holds events already: an emulation begins its own time anew, so its rows would all be late."""
    if settings.kafka:
        from ingest.kafka import check, end_offsets, ensure_topics

        check(settings.kafka)
        ensure_topics(settings.kafka, {settings.topic: settings.partitions})
        used = any(end_offsets(settings.kafka, settings.topic).values())
    else:
        with LocalLog(settings.log, settings.topic, settings.partitions) as log:
            used = any(log.end_offset(partition) for partition in range(log.partitions))
    if used:
        raise UsageError(
            f"the {shown(settings)} holds events already, and an emulation starts its time anew: its rows would all be late; "
            "name another --log (or --topic) and --store, or say --append"
        )


def shown(settings: Settings) -> str:
    """Where events went, for people."""
    return f"topic {settings.topic} at {settings.kafka}" if settings.kafka else f"local log {settings.log}"
