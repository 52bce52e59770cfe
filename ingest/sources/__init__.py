"""Trace and log readers: `read_trace` is the front door, `SOURCES` the registry of formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from ingest.errors import InputError, UsageError
from ingest.sources import dynamo, mooncake, qwen, ragpulse, tables, weka
from ingest.sources.base import Source, TraceRequest
from ingest.sources.files import Input, Meter, Progress, expand
from ingest.sources.reading import BadLines, OnBad, merge_inputs, read_inputs
from ingest.sources.tenants import zipf_tenants

__all__ = ["SOURCES", "Source", "TraceRequest", "read_trace"]

# Merging keeps every input open; the usual limit is 1024 files.
MAX_MERGED = 256

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (mooncake.SOURCE, weka.SOURCE, ragpulse.SOURCE, dynamo.SOURCE, qwen.SOURCE, tables.BURSTGPT, tables.AZURE)
}


def read_trace(
    paths: str | Path | Iterable[str | Path],
    format: str,
    *,
    tenant: str | None = None,
    assign_tenants: str | None = None,
    on_bad: OnBad | None = None,
    ignore_unknown_fields: bool = False,
    order: Literal["time", "session"] = "time",
    progress: Progress | None = None,
    limit: int | None = None,
    **source_options: Any,
) -> Iterator[TraceRequest]:
    """Requests of trace files in time order, streamed.

    `paths`: files (plain, gzip, zstd, xz, tar of these), folders, or `-` for standard input; several are one trace with one hash space,
    merged by time (one after another above 256). `format`: a key of `SOURCES`. `tenant` names the tenant of all; `assign_tenants`
    (`zipf:N`) draws one per conversation and marks it assigned. `on_bad` is told of every line that cannot be read, and reading goes on;
    without it the first one is raised. `order`: `time`, or `session` to take sessions one after another where the trace has no common clock
    (weka), which holds only one in memory; other formats come in time order either way, a file at a time. `progress(bytes_done, bytes_total
    or None)` is called as compressed bytes are read. `limit` ends after so many requests. Further options are the source's own
    (`Source.options`).

    Raises `UsageError` for an unknown format, option or tenant spec, at the call; `InputError` while reading for a missing, empty, cut or
    corrupt file, a bad line, a wrong format, or when nothing at all could be read. Memory: one line or session; what overlaps (weka);
    `reorder_s` of the log (dynamo); the whole trace (ragpulse, which is unsorted).
    """
    source = _source(format, source_options)
    label = _labeller(tenant, assign_tenants)
    if order not in ("time", "session"):
        raise UsageError(f"order={order!r} is not one of time, session")
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    inputs = expand(given, source.suffixes, source.beside)
    meter = Meter(inputs, progress)

    def stream(some: list[Input]) -> Iterator[TraceRequest]:
        decoder = source.decoder(ignore_unknown_fields=ignore_unknown_fields, **source_options)
        bad = BadLines(source, SOURCES.values(), on_bad)
        return read_inputs(source, some, decoder, bad, meter, ordered=order == "time" or source.clock != "session")

    # Sessions without a common clock take their start times from one decoder; other inputs are each in order of one clock.
    apart = order == "time" and source.clock != "session" and 1 < len(inputs) <= MAX_MERGED
    requests = merge_inputs([stream([one]) for one in inputs]) if apart else stream(inputs)
    return _finish(requests, label, limit, meter, _nothing(inputs, format))


def _source(format: str, options: dict[str, Any]) -> Source:
    source = SOURCES.get(format)
    if source is None:
        raise UsageError(f"format {format!r} is unknown; choose one of {', '.join(SOURCES)}")
    unknown = [name for name in options if name not in source.options]
    if unknown:
        known = ", ".join(source.options) or "none"
        raise UsageError(f"format {format} has no option {', '.join(unknown)}; it has {known}")
    return source


def _labeller(tenant: str | None, assign_tenants: str | None) -> Callable[[TraceRequest], None] | None:
    if tenant is not None and assign_tenants is not None:
        raise UsageError("give --tenant or --assign-tenants, not both")
    if assign_tenants is not None:
        tenant_of = zipf_tenants(assign_tenants)

        def assign(request: TraceRequest) -> None:
            request.tenant, request.tenant_assigned = tenant_of(request), True

        return assign
    if tenant is None:
        return None
    if not tenant.strip():
        raise UsageError("--tenant is empty; give a name")

    def name(request: TraceRequest) -> None:
        request.tenant = tenant

    return name


def _finish(
    requests: Iterator[TraceRequest], label: Callable[[TraceRequest], None] | None, limit: int | None, meter: Meter, nothing: InputError
) -> Iterator[TraceRequest]:
    count = 0
    for request in islice(requests, limit):
        count += 1
        if label is not None:
            label(request)
        yield request
    meter.finish()
    if not count and limit != 0:
        raise nothing


def _nothing(inputs: list[Input], format: str) -> InputError:
    names = ", ".join(one.name for one in inputs[:3])
    return InputError(names, 0, f"no {format} request could be read", "check that the file holds requests, and --format")
