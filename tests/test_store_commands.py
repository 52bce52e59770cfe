"""`kvtide migrate`, `sql` and `doctor`: output forms, exit codes and where errors go."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import sql
from kvtide import cli
from kvtide.commands import doctor
from kvtide.settings import Settings

VALUES = "SELECT toUInt64(18446744073709551615) AS hash, toDateTime64('2023-11-14 22:13:20.5', 3) AS at, NULL AS nothing, nan AS f, "
VALUES += "map('cold', toUInt64(9)) AS causes, [1, 2] AS list, 'a,\"b' AS text"


class Done(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(store_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command as the console script does, on a database of the test's own."""
    monkeypatch.setenv("KVTIDE_STORE", store_url)
    monkeypatch.delenv("KVTIDE_KAFKA", raising=False)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["kvtide", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return Done(int(stopped.value.code or 0), *capsys.readouterr())

    return call


def test_migrate_then_again(run: Callable[..., Done]) -> None:
    assert run("migrate", "--status").out.splitlines()[5].split() == ["0005_views", "pending"]
    dry = run("migrate", "--dry-run")
    assert dry.code == 0 and "CREATE TABLE IF NOT EXISTS access_raw" in dry.out
    assert f"{len(sql.migrations())} pending" in run("migrate", "--status").out
    first = run("migrate")
    assert first.code == 0 and "ran 0001_schema_migrations" in first.out
    again = run("migrate")
    assert again.code == 0 and "ran" not in again.out and "up to date" in again.out
    assert "0 pending" in run("migrate", "--status").out
    assert "nothing to do" in run("migrate", "--dry-run").out


def test_json_is_one_document_with_exact_values(run: Callable[..., Done]) -> None:
    done = run("sql", "--json", VALUES)
    assert done.err == ""
    assert json.loads(done.out) == {
        "columns": ["hash", "at", "nothing", "f", "causes", "list", "text"],
        "rows": [
            {
                "hash": 2**64 - 1,
                "at": "2023-11-14T22:13:20.500000Z",
                "nothing": None,
                "f": None,
                "causes": {"cold": 9},
                "list": [1, 2],
                "text": 'a,"b',
            }
        ],
    }
    assert "18446744073709551615" in done.out


def test_csv(run: Callable[..., Done]) -> None:
    rows = list(csv.reader(io.StringIO(run("sql", "--csv", VALUES).out)))
    assert rows == [
        ["hash", "at", "nothing", "f", "causes", "list", "text"],
        [str(2**64 - 1), "2023-11-14T22:13:20.500000Z", "", "", '{"cold": 9}', "[1, 2]", 'a,"b'],
    ]


def test_table_is_aligned_and_cut(run: Callable[..., Done]) -> None:
    out = run("sql", "SELECT number * 100 AS n, repeat('x', 100) AS long, '[b]' AS s FROM numbers(300)").out.splitlines()
    assert out[0].split() == ["n", "long", "s"]
    assert out[1].split() == ["0", "x" * 59 + "…", "[b]"] and len({len(line) for line in out[1:201]}) == 1
    assert out[-1] == "... and 100 more rows; --csv and --json print all"


def test_named_queries_with_parameters(run: Callable[..., Done]) -> None:
    run("migrate")
    run(
        "sql",
        "--write",
        "INSERT INTO traffic_1m (window_start, tenant, prompt_tokens, hit_tokens) VALUES ('2023-11-14 22:13:00', 'a', 8, 6)",
    )
    done = run("sql", "--json", "--named", "hit_ratio_by_tenant", "--param", "from=2023-11-14T22:00:00Z")
    assert json.loads(done.out)["rows"] == [{"tenant": "a", "requests": 0, "prompt_tokens": 8, "hit_tokens": 6, "hit_ratio": 0.75}]
    assert json.loads(run("sql", "--json", "--named", "hit_ratio_by_tenant", "--param", "to=2023-11-14").out) == {
        "columns": ["tenant", "requests", "prompt_tokens", "hit_tokens", "hit_ratio"],
        "rows": [],
    }
    assert json.loads(run("sql", "--json", "SELECT {n:UInt64} AS n", "--param", f"n={2**64 - 1}").out)["rows"] == [{"n": 2**64 - 1}]
    listed = run("sql", "--list").out
    assert (
        "capacity_curve: Hit ratio of one tenant against cache capacity" in listed and "    tenant String, required  whose curve" in listed
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sql", "SELECT nope"], "Unknown expression identifier `nope`"),
        (["sql", "SELEC 1"], "Syntax error"),
        (["sql", "SELECT * FROM hit_ratio"], "run `kvtide migrate`"),
        (["sql", "CREATE TABLE x (a Int8) ENGINE = Memory"], "may only read (--write allows more)"),
        (["sql"], "give a query, or --named NAME"),
        (["sql", "SELECT 1", "--named", "top_misses"], "give a query, or --named NAME"),
        (["sql", "--named", "nope"], "no query named 'nope'"),
        (["sql", "--named", "capacity_curve"], "misses tenant"),
        (["sql", "SELECT {n:UInt8}", "--param", "n"], "--param 'n' is not NAME=VALUE"),
        (["sql", "SELECT {n:UInt8}"], "parameter n is not set"),
        (["sql", "SELECT 1", "--store", "file:///x"], "neither chdb://FOLDER"),
    ],
)
def test_mistakes_are_one_line_on_stderr_with_code_2(run: Callable[..., Done], arguments: list[str], message: str) -> None:
    done = run(*arguments, "--json")
    assert (done.code, done.out) == (2, "")
    assert message in done.err and done.err.startswith("kvtide: ") and done.err.count("\n") == 1


def test_a_store_that_cannot_be_reached_is_code_1(run: Callable[..., Done]) -> None:
    done = run("sql", "SELECT 1", "--store", "http://127.0.0.1:9/x")
    assert (done.code, done.out) == (1, "") and "is ClickHouse running at" in done.err


def test_doctor_finds_a_store_that_is_not_migrated(run: Callable[..., Done]) -> None:
    run("sql", "SELECT 1")
    done = run("doctor", "--json")
    found = json.loads(done.out)
    checks = {check["name"]: check for check in found["checks"]}
    assert done.code == 1 and not found["ok"]
    assert checks["store"]["state"] == "problem" and checks["store"]["mend"] == "run `kvtide migrate`"
    run("migrate")
    done = run("doctor", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["ok"]
    assert list(checks) == ["python", "packages", "numba cache", "disk", "store", "kafka", "java"]
    assert [item["name"] for item in found["settings"]][:2] == ["KVTIDE_STORE", "KVTIDE_LOG"]
    text = run("doctor").out
    assert "KVTIDE_GRACE_S" in text and "migrations pending" not in text


def test_doctor_does_not_make_the_store(tmp_path: Path) -> None:
    found = doctor.store(Settings(store=f"chdb://{tmp_path}/none"))
    assert found.state == "note" and "kvtide migrate" in found.mend and not (tmp_path / "none").exists()


def test_doctor_names_each_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store_folder: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert doctor.java(Settings()).detail == "no java and no mvn"
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1, 1, 0))
    assert doctor.disk(Settings()).state == "problem"
    monkeypatch.setattr(doctor, "_version", lambda name: "")
    assert "pip install" in doctor.packages(Settings()).mend and "chdb" in doctor.packages(Settings()).detail
    assert "chdb" not in doctor.packages(Settings(store="http://h/d")).detail
    assert "127.0.0.1:9" in doctor.store(Settings(store="http://u:secret@127.0.0.1:9/d")).detail
    assert "secret" not in doctor.store(Settings(store="http://u:secret@127.0.0.1:9/d")).detail
    other = doctor.store(Settings(store=f"chdb://{tmp_path}"))
    assert other.state == "problem" and "one folder per process" in other.detail


def test_a_locked_store_is_named(store_folder: Path) -> None:
    environment = {**os.environ, "KVTIDE_STORE": f"chdb://{store_folder}", "KVTIDE_KAFKA": ""}
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", "doctor", "--json"], capture_output=True, text=True, env=environment, check=False
    )
    store = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "store")
    assert done.returncode == 1 and f"open in another process (pid {os.getpid()})" in store["detail"]
