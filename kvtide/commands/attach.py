"""`kvtide attach`: production request logs become events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ingest.batching import Batcher
from kvtide.attaching import NO_RESIDENCY, publish_log
from kvtide.eventlog import log_options, log_settings, open_sink, shown
from kvtide.tracefiles import TraceInput, trace_options


@click.command()
@trace_options
@log_options
@click.option("--open", "stay_open", is_flag=True, help="More of this log will follow: leave its last windows open.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else there.")
def command(
    kafka: str | None, log: str | None, topic: str | None, partitions: int | None, stay_open: bool, as_json: bool, **given: Any
) -> None:
    """Publish production request logs as events, then let `kvtide work` consume them.

    The log must say for each request which instance served it and how many tokens came from its cache; today that is the Dynamo request
    trace (--format dynamo, DYN_REQUEST_TRACE=1). `-` reads standard input. What a worker cannot accept becomes a dead letter.
    """
    settings = log_settings(kafka, log, topic, partitions)
    trace = TraceInput(**given)
    source = "log:" + ",".join(Path(path).name for path in given["paths"])
    sink = open_sink(settings)
    try:
        sent = publish_log(trace.requests("time"), Batcher(sink, settings.partitions), source, close=not stay_open)
    finally:
        sink.close()
    summary = {"where": shown(settings), "rows": sent, "bad_records": trace.bad_records, "note": NO_RESIDENCY}
    if as_json:
        click.echo(json.dumps(summary))
    else:
        click.echo(f"{sent['access']} requests to {summary['where']}; {NO_RESIDENCY}. Next: kvtide work --until-end", err=True)
    trace.finish()
