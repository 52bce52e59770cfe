"""`kvtide diagnose`: name the cause of a hit-ratio decline from the stored windows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import click
from rich.console import Console
from rich.table import Table

from analytics.advisor import prefill_cost
from analytics.diagnosis import Diagnosis, diagnose
from analytics.frame import Frame, Span
from ingest.errors import KvtideError, UsageError
from ingest.store import Store
from kvtide.frames import load_frame, parse_time, save_diagnosis
from kvtide.report import report_data, write_report
from kvtide.settings import Settings


@click.command()
@click.option("--store", "url", metavar="URL", help="Store URL; default: KVTIDE_STORE.")
@click.option("--tenant", help="Explain one tenant's hit ratio instead of the fleet's.")
@click.option("--from", "from_", metavar="TIME", help="Start of the stretch to explain (ISO 8601, UTC); default: the onset that is found.")
@click.option("--to", metavar="TIME", help="Its end, not included; default: the last window.")
@click.option("--baseline-from", metavar="TIME", help="Start of the stretch to compare with; default: 15 minutes before.")
@click.option("--baseline-to", metavar="TIME", help="Its end, not included; default: the start of the stretch to explain.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--html", metavar="FILE", help="Write the report as one HTML file too.")
def command(
    url: str | None, tenant: str | None, from_: str | None, to: str | None, baseline_from: str | None, baseline_to: str | None,
    as_json: bool, html: str | None,
) -> None:  # fmt: skip
    """Say when the hit ratio fell, by which causes and tenants, and what is behind it. The diagnosis is also kept in the store.

    Without --from the onset is detected; no significant decline gives the verdict `none`.
    """
    bounds = _bounds({"--from": from_, "--to": to, "--baseline-from": baseline_from, "--baseline-to": baseline_to})
    with Store.open(Settings.from_env(store=url).store) as store:
        frame = load_frame(store)
        current, baseline = _spans(frame, bounds)
        try:
            found = diagnose(frame, baseline, current, tenant=tenant, prefill_cost=prefill_cost(frame))
        except KeyError as error:
            raise UsageError(f"no tenant {tenant!r} in the store; there are {', '.join(frame.tenants)}") from error
        except ValueError as error:
            raise KvtideError(f"{error}; the store holds {_shown(frame)}") from error
        save_diagnosis(store, found, time.time_ns() // 1000)
        if html:
            write_report(html, report_data(store, frame, found, ()))
    if as_json:
        click.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        print_diagnosis(found)
        if html:
            click.echo(f"report: {html}")


def _bounds(texts: Mapping[str, str | None]) -> dict[str, float | None]:
    bounds: dict[str, float | None] = {}
    for option, text in texts.items():
        try:
            bounds[option] = None if text is None else parse_time(text)
        except ValueError as error:
            raise UsageError(f"{option} {text!r} is not an ISO 8601 time such as 2025-01-01T00:20:00") from error
    return bounds


def _spans(frame: Frame, bounds: Mapping[str, float | None]) -> tuple[Span | None, Span | None]:
    """(current, baseline) as asked for; None where they are to be found."""
    start, end = bounds["--from"], bounds["--to"]
    if end is not None and start is None:
        raise UsageError("--to needs --from")
    last_s = float(frame.window_s[-1] + frame.width_s)
    current = None if start is None else Span(start, last_s if end is None else end)
    base_start, base_end = bounds["--baseline-from"], bounds["--baseline-to"]
    if base_start is None and base_end is None:
        return current, None
    if base_start is None or (base_end is None and current is None):
        raise UsageError("--baseline-from and --baseline-to go together; without --from both are needed")
    stop = base_end if base_end is not None else current.from_s if current is not None else last_s
    return current, Span(base_start, stop)


def _shown(frame: Frame) -> str:
    first, last = (time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(float(frame.window_s[i]))) for i in (0, -1))
    return f"windows from {first} to {last} UTC"


def print_diagnosis(found: Diagnosis) -> None:
    """The diagnosis for people: verdict, evidence, and contributions by cause."""
    console = Console(highlight=False)
    behind = f" ({found.target})" if found.target else ""
    console.print(f"verdict: [bold]{found.verdict}[/bold]{behind}")
    for line in found.evidence:
        console.print(f"  {line}", markup=False, soft_wrap=True)
    table = Table("cause", box=None, pad_edge=False, header_style="bold")
    table.add_column("points", justify="right")
    for cause, points in sorted(found.contributions.items(), key=lambda item: item[1]):
        if abs(points) >= 0.005:
            table.add_row(cause, f"{points:+.2f}")
    table.add_row("sum", f"{found.change_points:+.2f}")
    console.print(table)
