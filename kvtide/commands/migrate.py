"""`kvtide migrate`: create or upgrade the tables and views."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table

import sql
from ingest.store import Store
from kvtide.settings import Settings


@click.command()
@click.option("--store", "url", help="Store URL; default: KVTIDE_STORE.")
@click.option("--dry-run", is_flag=True, help="Print the SQL that would run; change nothing.")
@click.option("--status", is_flag=True, help="List all migrations and when each was run; change nothing.")
def command(url: str | None, dry_run: bool, status: bool) -> None:
    """Create or upgrade the ClickHouse tables and views. Running it again does nothing."""
    settings = Settings.from_env(store=url)
    with Store.open(settings.store, create=not (dry_run or status)) as store:
        if status:
            _print_status(store)
        elif dry_run:
            pending = store.pending()
            texts = {f"{m.number:04d}_{m.name}": m.text for m in sql.migrations()}
            click.echo("\n".join(f"-- {name}\n{texts[name]}" for name in pending) or f"-- nothing to do in {store.address.shown}")
        else:
            done = store.migrate()
            for name in done:
                click.echo(f"ran {name}")
            click.echo(f"{store.address.shown} is up to date ({len(sql.migrations())} migrations)")


def _print_status(store: Store) -> None:
    pending, applied = store.pending(), {row["number"]: row["applied_at"] for row in store.applied()}
    table = Table("migration", "run at (UTC)", box=None)
    for migration in sql.migrations():
        at = applied.get(migration.number)
        table.add_row(f"{migration.number:04d}_{migration.name}", at.strftime("%Y-%m-%d %H:%M:%S") if at else "pending")
    Console().print(table)
    click.echo(f"{store.address.shown}: {len(pending)} pending")
