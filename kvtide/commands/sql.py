"""`kvtide sql`: run a query on the store."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

import sql
from ingest.errors import UsageError
from ingest.store import QueryError, Result, Store
from kvtide.settings import Settings

SHOWN_ROWS = 200
CELL_WIDTH = 60


@click.command()
@click.argument("text", required=False)
@click.option("--store", "url", help="Store URL; default: KVTIDE_STORE.")
@click.option(
    "--json", "form", flag_value="json", help='One JSON document: {"columns": [...], "rows": [{...}]}; integers exact, times ISO 8601.'
)
@click.option("--csv", "form", flag_value="csv", help="CSV with a header line.")
@click.option("--named", metavar="NAME", help="Run a query that comes with kvtide; see --list.")
@click.option("--param", "params", multiple=True, metavar="NAME=VALUE", help="Value of a {NAME:Type} placeholder; may be repeated.")
@click.option("--list", "list_", is_flag=True, help="List the named queries with their parameters.")
@click.option("--write", is_flag=True, help="Allow statements that change the store.")
def command(
    text: str | None, url: str | None, form: str | None, named: str | None, params: tuple[str, ...], list_: bool, write: bool
) -> None:
    """Run a query on the store, for example: kvtide sql "SELECT tenant, hit_ratio FROM hit_ratio". "-" reads it from stdin.

    Reads only, unless --write is given.
    """
    if list_:
        _print_queries()
        return
    if (text is None) == (named is None):
        raise UsageError("give a query, or --named NAME (kvtide sql --list shows the names)")
    given: dict[str, object] = dict(_pair(item) for item in params)
    if named is not None:
        try:
            query, given = sql.complete(named, given)
        except ValueError as error:
            raise UsageError(str(error)) from error
        text = query.text
    try:
        with Store.open(Settings.from_env(store=url).store, readonly=not write) as store:
            result = store.fetch(sys.stdin.read() if text == "-" else str(text), **given)
    except QueryError as error:
        raise UsageError(f"{error}{' (--write allows more)' if 'may only read' in str(error) else ''}") from error
    PRINTERS[form](result)


def _pair(item: str) -> tuple[str, str]:
    name, sign, value = item.partition("=")
    if not sign or not name.isidentifier():
        raise UsageError(f"--param {item!r} is not NAME=VALUE")
    return name, value


def _print_json(result: Result) -> None:
    rows = [dict(zip(result.columns, map(_plain, row), strict=True)) for row in result.rows]
    click.echo(json.dumps({"columns": result.columns, "rows": rows}, ensure_ascii=False, allow_nan=False))


def _print_csv(result: Result) -> None:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(result.columns)
    writer.writerows([_cell(value) for value in row] for row in result.rows)
    click.echo(out.getvalue(), nl=False)


def _print_table(result: Result) -> None:
    if not result.columns:
        click.echo("done")
        return
    console = Console() if sys.stdout.isatty() else Console(width=10_000)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, kind in zip(result.columns, result.types, strict=True):
        numeric = any(word in kind for word in ("Int", "Float", "Decimal")) and "(" not in kind.removeprefix("Nullable(")
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True, overflow="ellipsis", max_width=CELL_WIDTH)
    for row in result.rows[:SHOWN_ROWS]:
        table.add_row(*(Text(_short(value)) for value in row))
    console.print(table)
    if len(result.rows) > SHOWN_ROWS:
        click.echo(f"... and {len(result.rows) - SHOWN_ROWS} more rows; --csv and --json print all")


PRINTERS: dict[str | None, Callable[[Result], None]] = {None: _print_table, "json": _print_json, "csv": _print_csv}


def _plain(value: Any) -> Any:
    """A value as JSON has it: integers stay exact, times are ISO 8601, NaN and infinities null, bytes and the rest text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, datetime | date):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _cell(value: Any) -> str:
    """A value as one CSV cell; null is empty, lists and maps are JSON."""
    plain = _plain(value)
    if plain is None:
        return ""
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, dict | list) else str(plain)


def _short(value: Any) -> str:
    """A value for people: floats to 6 digits, times without zone, long text cut."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S" + (".%f" if value.microsecond else ""))
    text = _cell(value).replace("\n", " ")
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


def _print_queries() -> None:
    for name, query in sql.queries().items():
        click.echo(f"{name}: {query.title}")
        for parameter, kind in query.types.items():
            default = f" = {query.defaults[parameter]!r}" if parameter in query.defaults else ", required"
            click.echo(f"    {parameter} {kind}{default}  {query.meanings.get(parameter, '')}")
