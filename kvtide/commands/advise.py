"""`kvtide advise`: recommend scaling and routing from the stored windows."""

from __future__ import annotations

import json
import time

import click
import numpy as np
from rich.console import Console

from analytics.advisor import Advice, ScalePolicy, advise_scale
from analytics.frame import Frame, Span
from ingest.store import Store
from kvtide.frames import load_frame, load_service, save_advice
from kvtide.replay import route_advice
from kvtide.settings import Settings


@click.command()
@click.option("--store", "url", metavar="URL", help="Store URL; default: KVTIDE_STORE.")
@click.option("--minutes", type=click.IntRange(1), default=15, show_default=True, help="How many of the last minutes to go by.")
@click.option("--ttft-p99", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Target for the p99 TTFT in seconds.")
@click.option(
    "--max-utilisation", type=click.FloatRange(0, 1, min_open=True), default=0.7, show_default=True, help="Busy share to stay below."
)
@click.option("--route/--no-route", default=True, help="Replay the accesses through other routers in the emulator.  [default: route]")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def command(url: str | None, minutes: int, ttft_p99: float | None, max_utilisation: float, route: bool, as_json: bool) -> None:
    """Recommend how many instances to run and which router to use, with predicted effect. The advice is also kept in the store."""
    policy = ScalePolicy(max_utilisation=max_utilisation, ttft_p99_target_s=ttft_p99)
    with Store.open(Settings.from_env(store=url).store) as store:
        frame = load_frame(store)
        advice, notes = make_advice(store, frame, minutes=minutes, policy=policy, route=route)
        made_at_us = time.time_ns() // 1000
        save_advice(store, [item.row(made_at_us) for item in advice])
    for note in notes:
        click.echo(f"kvtide: {note}", err=True)
    if as_json:
        click.echo(json.dumps({"advice": [item.to_json() for item in advice]}, allow_nan=False))
    else:
        print_advice(advice)


def make_advice(
    store: Store, frame: Frame, *, minutes: int = 15, policy: ScalePolicy | None = None, route: bool = True
) -> tuple[list[Advice], list[str]]:
    """Scale and route advice by the last `minutes` with traffic, and notes on what could not be advised and why."""
    active = np.flatnonzero(frame.fleet.prompt_tokens.sum(axis=1) > 0)
    span = Span(float(frame.window_s[active[-minutes:][0]]), float(frame.window_s[active[-1]] + frame.width_s))
    advice, notes = [], []
    scale = advise_scale(frame, frame.mask(span), load_service(store, span), policy)
    if scale is None:
        notes.append("no scale advice: no instance was up in the last minutes, or none reported its KV capacity (a request log has none)")
    else:
        advice.append(scale)
    if route:
        found = route_advice(store, span)
        if found is None:
            notes.append("no route advice: the last minutes hold no accesses with chains and prefill times to replay")
        else:
            advice.append(found)
    return advice, notes


def print_advice(advice: list[Advice]) -> None:
    """Advice for people: what, target, predicted effect now -> then, and why."""
    console = Console(highlight=False)
    for item in advice:
        console.print(f"[bold]{item.kind}[/bold] {item.target}  (confidence {item.confidence:.2f})")
        for key, value in item.predicted.items():
            if f"{key}_now" in item.predicted and key != "instances":
                console.print(f"  {key}: {item.predicted[f'{key}_now']:.3g} -> {value:.3g}", markup=False)
        for line in item.evidence:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    if not advice:
        console.print("no advice")
