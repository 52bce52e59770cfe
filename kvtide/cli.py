"""The `kvtide` command: a group that imports a subcommand only when it is called, so that `--help` and errors are instant."""

from __future__ import annotations

import importlib
import sys

import click

from ingest.errors import InputError, KvtideError, UsageError
from kvtide import __version__

COMMANDS = {
    "demo": "Emulate a fleet, inject a hit-ratio decline, diagnose it and advise.",
    "analyze": "Say what a trace holds: requests, blocks, ideal hit ratio.",
    "mrc": "Hit ratio against capacity (the miss-ratio curve) of a trace.",
    "emulate": "Run a trace or a generated load through an emulated fleet and publish its events.",
    "attach": "Publish production request logs as events.",
    "work": "Consume events and write windows, causes and curves to ClickHouse.",
    "diagnose": "Name the cause of a hit-ratio decline from the stored windows.",
    "advise": "Recommend scaling and routing from the stored windows.",
    "migrate": "Create or upgrade the ClickHouse tables and views.",
    "sql": "Run a query on the store.",
    "doctor": "Check this machine, the store and Kafka, and say how to mend what is wrong.",
    "lab": "Eviction policies, routers and tiers side by side on traces.",
    "bench": "Measure kvtide beside named references.",
}


class LazyGroup(click.Group):
    """Commands live in `kvtide/commands/<name>.py` as `command`; only the one that runs is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"kvtide.commands.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def cli() -> None:
    """Why the prefix-cache hit ratio of a Prefill fleet moves, what capacity is worth, and what to do now.

    Start with `kvtide demo`. Settings are KVTIDE_* environment variables; `kvtide doctor` lists them with their values.
    """


def main() -> None:
    """Run the command; kvtide's own errors become one line on stderr and exit code 2 (usage, bad input) or 1."""
    try:
        cli()
    except (UsageError, InputError) as error:
        click.echo(f"kvtide: {error}", err=True)
        sys.exit(2)
    except KvtideError as error:
        click.echo(f"kvtide: {error}", err=True)
        sys.exit(1)
