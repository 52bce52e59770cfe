"""`kvtide doctor`: what is wrong on this machine, and how to mend it."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingest.address import parse_url
from ingest.errors import KvtideError
from ingest.store import Store
from kvtide.settings import Settings

LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 200 << 20
ENOUGH_FREE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: `ok`, `note` (something optional is absent) or `problem` (kvtide will not work); `mend` says what to do."""

    name: str
    state: Literal["ok", "note", "problem"]
    detail: str
    mend: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document: {ok, checks, settings}.")
def command(as_json: bool) -> None:
    """Check this machine, the store and Kafka, and say how to mend what is wrong. Exit code 1 when something must be mended."""
    settings = Settings.from_env()
    checks = [probe(settings) for probe in PROBES]
    listed = [
        {"name": f"KVTIDE_{f.name.upper()}", "value": _shown(f.name, getattr(settings, f.name)), "help": f.metadata["help"]}
        for f in fields(settings)
    ]
    ok = all(check.state != "problem" for check in checks)
    if as_json:
        click.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks], "settings": listed}))
    else:
        _print(checks, listed)
    if not ok:
        sys.exit(1)


def _print(checks: list[Check], listed: list[dict[str, object]]) -> None:
    console = Console()
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        table.add_row(Text(check.state, styles[check.state]), check.name, Text(check.detail + (f"\n-> {check.mend}" if check.mend else "")))
    console.print(table)
    settings = Table("setting", "value", "meaning", box=None, pad_edge=False, header_style="bold")
    for item in listed:
        settings.add_row(str(item["name"]), Text(repr(item["value"])), Text(str(item["help"])))
    console.print()
    console.print(settings)


def _shown(name: str, value: object) -> object:
    """A setting's value without the store's password."""
    if name != "store":
        return value
    try:
        return parse_url(str(value)).shown
    except KvtideError:
        return "(not a store URL)"


def python(settings: Settings) -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < LEAST_PYTHON:
        return Check("python", "problem", version, "kvtide needs Python 3.11 or newer")
    return Check("python", "ok", version)


def packages(settings: Settings) -> Check:
    """Whether everything that kvtide declares is installed."""
    absent = []
    for requirement in importlib.metadata.requires("kvtide") or []:
        name, _, extra = requirement.partition(";")
        name = re.split(r"[<>=!~\s\[(]", name.strip())[0]
        wanted = not extra or ("embedded" in extra and settings.store.startswith("chdb:"))
        if wanted and not _version(name):
            absent.append(name)
    if absent:
        return Check("packages", "problem", f"not installed: {', '.join(absent)}", f"pip install {' '.join(absent)}")
    return Check("packages", "ok", f"clickhouse-connect {_version('clickhouse-connect')}, chdb {_version('chdb') or 'absent'}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def numba_cache(settings: Settings) -> Check:
    """Whether compiled kernels can be kept; otherwise every start compiles them again."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(str(importlib.import_module("analytics").__file__)).parent
    places = [Path(chosen)] if chosen else [beside, Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()]
    for place in places:
        if os.access(_existing(place), os.W_OK):
            return Check("numba cache", "ok", str(place))
    mend = "set NUMBA_CACHE_DIR to a folder that can be written, or every start spends a minute on compiling"
    return Check("numba cache", "note", f"cannot write {' nor '.join(map(str, places))}", mend)


def _existing(path: Path) -> Path:
    """The path itself or its nearest parent that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def disk(settings: Settings) -> Check:
    try:
        address = parse_url(settings.store)
    except KvtideError:
        address = None
    place = _existing(Path(address.path if address and address.path else settings.log))
    free = shutil.disk_usage(place).free
    detail = f"{free / (1 << 30):.1f} GiB free at {place}"
    if free < LEAST_FREE_BYTES:
        return Check("disk", "problem", detail, "free some space, or put KVTIDE_STORE and KVTIDE_LOG elsewhere")
    if free < ENOUGH_FREE_BYTES:
        return Check("disk", "note", detail, "a long replay may need a few GiB")
    return Check("disk", "ok", detail)


def store(settings: Settings) -> Check:
    """Whether the store answers and is migrated; an embedded folder is not made by asking."""
    try:
        address = parse_url(settings.store)
        if address.path is not None and not Path(address.path).exists():
            return Check("store", "note", f"{address.shown} does not exist yet", "run `kvtide migrate`")
        with Store.open(settings.store, readonly=True) as opened:
            pending = opened.pending()
            version = opened.version
    except KvtideError as error:
        return Check("store", "problem", str(error), "correct KVTIDE_STORE, or start or migrate what it names")
    detail = f"{address.shown}, ClickHouse {version}"
    if pending:
        return Check("store", "problem", f"{detail}, {len(pending)} migrations pending", "run `kvtide migrate`")
    return Check("store", "ok", detail)


def kafka(settings: Settings) -> Check:
    if not settings.kafka:
        return Check("kafka", "ok", f"not used; events go to the local log {settings.log}")
    try:
        return Check("kafka", "ok", importlib.import_module("ingest.kafka").check(settings.kafka))
    except KvtideError as error:
        return Check("kafka", "problem", str(error), "start Kafka, or correct KVTIDE_KAFKA (unset it for the local log)")


def java(settings: Settings) -> Check:
    """Java 17 and Maven start the broker that the tests use; nothing else needs them."""
    mend = "install Java 17 or newer and Maven to run the Kafka tests, or point KVTIDE_TEST_KAFKA at a broker"
    absent = [tool for tool in ("java", "mvn") if shutil.which(tool) is None]
    if absent:
        return Check("java", "note", f"no {' and no '.join(absent)}", mend)
    said = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    match = re.search(r'version "(\d+)', said)
    major = int(match[1]) if match else 0
    if major < 17:
        return Check("java", "note", f"Java {major or 'of unknown version'}", mend)
    return Check("java", "ok", f"Java {major}, Maven at {shutil.which('mvn')}")


PROBES: list[Callable[[Settings], Check]] = [python, packages, numba_cache, disk, store, kafka, java]
