"""The prefill cost of a model, as the command line takes it: seconds per token and per token squared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ingest.errors import UsageError

DEFAULT_COST = "2e-4,2e-8"  # a 70B-class model on one Prefill instance; weight 'cost' of the view mrc counts with the same


def prefill_cost_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--prefill-cost A,B`, passed on as text; `parse_cost` reads it."""
    option = click.option(
        "--prefill-cost",
        metavar="A,B",
        default=DEFAULT_COST,
        show_default=True,
        help="Prefill seconds per token and per token squared, for what is weighted by cost.",
    )
    return option(command)


def parse_cost(text: str) -> tuple[float, float]:
    """(a, b) of `A,B`. Raises `UsageError` unless they are two numbers, neither negative nor both 0."""
    try:
        a, b = (float(part) for part in text.split(","))
    except ValueError:
        a = b = -1.0
    if not (a >= 0 and b >= 0 and 0 < a + b < float("inf")):
        raise UsageError(f"--prefill-cost {text!r} is not A,B in seconds per token and per token squared, for example {DEFAULT_COST}")
    return a, b
