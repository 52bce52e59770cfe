"""Trace files on the command line: the options that every command over a trace takes, a progress bar, and what is said of bad lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ingest.errors import InputError
from ingest.sources import SOURCES, Source, TraceRequest, read_trace

SHOWN_BAD_LINES = 20
BAD_INPUT_EXIT = 2

F = TypeVar("F", bound=Callable[..., Any])


def trace_options(command: F) -> F:
    """PATH..., --format, --tenant, --assign-tenants, --limit, --skip-bad and --ignore-unknown-fields, for a command over a trace."""
    for option in reversed(
        (
            click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
            click.option("--format", "-f", "format_", required=True, type=click.Choice(list(SOURCES)), help="Dialect of the files."),
            click.option("--tenant", help="Name of the tenant of all requests."),
            click.option("--assign-tenants", metavar="zipf:N", help="Draw one of N tenants for each conversation; marked as assigned."),
            click.option("--limit", type=click.IntRange(min=1), help="Stop after this many requests."),
            click.option("--skip-bad", is_flag=True, help="Exit with 0 although lines could not be read."),
            click.option("--ignore-unknown-fields", is_flag=True, help="Read past fields that the dialect does not have."),
        )
    ):
        command = option(command)
    return command


class TraceInput:
    """The requests of the files named on the command line; bad lines are told to stderr and counted, and reading goes on."""

    def __init__(
        self,
        paths: tuple[str, ...],
        format_: str,
        tenant: str | None,
        assign_tenants: str | None,
        limit: int | None,
        skip_bad: bool,
        ignore_unknown_fields: bool,
        **source_options: Any,
    ) -> None:
        self.name, self.source = " ".join(paths), SOURCES[format_]
        self.bad_records = 0
        self._skip_bad = skip_bad
        self._read = partial(
            read_trace,
            paths,
            format_,
            tenant=tenant,
            assign_tenants=assign_tenants,
            limit=limit,
            ignore_unknown_fields=ignore_unknown_fields,
            on_bad=self._bad,
            **source_options,
        )

    def requests(self, order: Literal["time", "session"] = "time") -> Iterator[TraceRequest]:
        """Requests as they are read, with a bar on stderr when that is a terminal. Raises `InputError` where nothing can be read."""
        if not sys.stderr.isatty():
            yield from self._read(order=order)
        else:
            with _bar() as bar:
                task = bar.add_task(self.name, total=None)
                yield from self._read(order=order, progress=lambda done, total: bar.update(task, completed=done, total=total))
        if self.bad_records > SHOWN_BAD_LINES:
            click.echo(f"kvtide: {self.bad_records - SHOWN_BAD_LINES} more records could not be read", err=True)

    def finish(self) -> None:
        """End the command: with exit code 2 when something could not be read, unless told to skip that."""
        if self.bad_records and not self._skip_bad:
            sys.exit(BAD_INPUT_EXIT)

    def _bad(self, error: InputError) -> None:
        self.bad_records += 1
        if self.bad_records <= SHOWN_BAD_LINES:
            click.echo(f"kvtide: {error}", err=True)


def clock_note(source: Source) -> str | None:
    """What a reader must know of the trace's times, if anything."""
    if source.clock == "session":
        return "sessions have no common clock; their start times are given, not observed"
    return None


def plain_table(*names: str, title: str | None = None) -> Table:
    """A table that also reads well in a pipe: no frame, first column to the left, numbers to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False, title=title, title_justify="left")
    for i, name in enumerate(names):
        table.add_column(Text(name), justify="right" if i else "left", no_wrap=True)
    return table


def plain_console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut."""
    return Console(highlight=False) if sys.stdout.isatty() else Console(width=1000, highlight=False)


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
