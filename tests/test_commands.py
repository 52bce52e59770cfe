"""The command line as its user has it: every command in a process and a folder of its own, from files to answers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from analytics.fleet.scenarios import SCENARIOS
from kvtide.cli import COMMANDS

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_")}
HUGE = [2**64 - 1, 2**63, 2**63 + 1, 7]


class Done(NamedTuple):
    code: int
    out: str
    err: str


def run(place: Path, *arguments: str, stdin: str | None = None, **environment: str) -> Done:
    """`kvtide ARGUMENTS` in a folder."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtide", *arguments],
        cwd=place,
        env=ENVIRONMENT | environment,
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def document(done: Done, code: int = 0) -> Any:
    """The one JSON document that stdout must be, on one line and with nothing beside it."""
    assert done.code == code, done.err
    assert done.out.endswith("\n") and done.out.count("\n") == 1, done.out
    return json.loads(done.out)


def rows(place: Path, query: str) -> list[dict[str, Any]]:
    """What `kvtide sql --json` answers on the folder's own store."""
    return list(document(run(place, "sql", "--json", query))["rows"])


def write(path: Path, *objects: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in objects))
    return path


def mooncake(at_ms: int, tokens: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "output_length": 10, "hash_ids": list(ids)}


def dynamo(number: int, tokens: int, cached: int, chain: list[int], **request: Any) -> dict[str, Any]:
    """A `request_end` event of the given second; blocks of 16 tokens."""
    at_ms = 1_760_000_000_000 + 1000 * number
    fields = {
        "request_id": f"q{number}",
        "model": "m",
        "output_tokens": 3,
        "cached_tokens": cached,
        "request_received_ms": at_ms,
        "prefill_time_ms": 5.0,
        "ttft_ms": 6.5,
        "worker": {"prefill_worker_id": 2**63 + number % 2, "prefill_dp_rank": 0},
        "replay": {"trace_block_size": 16, "input_length": tokens, "input_sequence_hashes": chain},
    }
    event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": at_ms + 50}
    return {"timestamp": number, "event": {**event, "request": {**fields, **request}}}


# -- help -----------------------------------------------------------------------------------------------------------------------------


def test_help_of_every_command_names_all_its_options(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        shown = dict(zip(COMMANDS, pool.map(lambda name: run(tmp_path, name, "--help"), COMMANDS), strict=True))
    for name, done in shown.items():
        command: click.Command = importlib.import_module(f"kvtide.commands.{name}").command
        options = [option for parameter in command.params if isinstance(parameter, click.Option) for option in parameter.opts]
        assert (done.code, done.err) == (0, "") and done.out.startswith(f"Usage: python -m kvtide {name} ")
        assert options and [option for option in options if option not in done.out] == []
    assert list(tmp_path.iterdir()) == [], "help writes nothing"


def test_help_and_version_of_kvtide_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert (done.code, done.err) == (0, "")
    assert [line.split()[0] for line in done.out.split("Commands:\n")[1].splitlines() if line.startswith("  ") and line[2] != " "] == list(
        COMMANDS
    )
    assert run(tmp_path, "-h").out == done.out
    assert run(tmp_path, "--version").out.strip().endswith("0.1.0")


# -- emulate, work, sql, diagnose, advise -----------------------------------------------------------------------------------------------


class Emulated(NamedTuple):
    place: Path
    emulated: dict[str, Any]
    worked: dict[str, Any]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """Three minutes of a scenario, published to the local log and worked into the embedded store of one folder."""
    place = tmp_path_factory.mktemp("emulated")
    summary = document(run(place, "emulate", "--scenario", "none", "--minutes", "3", "--partitions", "4", "--json"))
    worked = run(place, "work", "--until-end", "--json")
    assert "checkpoints" in worked.err and "{" not in worked.err, "progress goes to stderr"
    return Emulated(place, summary, document(worked))


def test_emulate_says_what_it_published_and_work_finds_all_of_it(emulated: Emulated) -> None:
    sent, worked = emulated.emulated, emulated.worked
    assert sent["load"] == "synthetic" and sent["where"] == "local log .kvtide/log"
    assert sent["requests"] == sent["rows"]["access"] > 500 and sent["failed"] == 0
    assert 0.3 < sent["hit_ratio"] < 1 and 0 < sent["ttft_p50_s"] <= sent["ttft_p99_s"]
    assert worked["rows"] == sent["rows"]["access"] + sent["rows"]["residency"] + 4 * sent["rows"]["instance"]
    assert (worked["bad_records"], worked["bad_rows"], worked["skipped"], worked["lag"]) == (0, 0, 0, 0)


def test_the_store_agrees_with_the_emulator(emulated: Emulated) -> None:
    (total,) = rows(emulated.place, "SELECT sum(requests) AS n, sum(hit_tokens) AS hit, sum(prompt_tokens) AS prompt FROM traffic_1m")
    (raw,) = rows(emulated.place, "SELECT count() AS n, sum(hit_tokens) AS hit, sum(prompt_tokens) AS prompt FROM access_raw")
    (causes,) = rows(emulated.place, "SELECT sum(tokens) AS prompt, sumIf(tokens, cause = 'hit') AS hit FROM cause_1m")
    assert total["n"] == raw["n"] == emulated.emulated["requests"]
    assert total["hit"] == raw["hit"] == causes["hit"] and total["prompt"] == raw["prompt"] == causes["prompt"]
    assert total["hit"] / total["prompt"] == pytest.approx(emulated.emulated["hit_ratio"], abs=1e-12)
    tenants = rows(emulated.place, "SELECT tenant, hit_ratio FROM hit_ratio")
    assert {row["tenant"] for row in tenants} == {"chat", "agent", "rag", "code", "support", "batch"}
    assert all(0 <= row["hit_ratio"] <= 1 for row in tenants)


def test_work_again_does_nothing_twice(emulated: Emulated) -> None:
    before = rows(emulated.place, "SELECT sum(requests) AS n FROM traffic_1m")
    again = document(run(emulated.place, "work", "--until-end", "--json"))
    assert again["records"] == again["windows"] == again["inserted_rows"] == 0
    assert rows(emulated.place, "SELECT sum(requests) AS n FROM traffic_1m") == before


def test_diagnose_and_advise_answer_in_one_document(emulated: Emulated) -> None:
    found = document(run(emulated.place, "diagnose", "--json"))
    assert found["verdict"] == "none" and set(found["hit_ratio"]) == {"before", "after"}
    advice = document(run(emulated.place, "advise", "--no-route", "--json"))["advice"]
    assert [item["kind"].split("_")[0] for item in advice] == ["scale"]


def test_a_seed_always_gives_the_same_log(tmp_path: Path) -> None:
    def log(name: str, seed: str) -> dict[str, bytes]:
        done = run(tmp_path, "emulate", "--scenario", "none", "--minutes", "2", "--partitions", "2", "--seed", seed, "--log", name)
        assert (done.code, done.out) == (0, "") and f"local log {name}" in done.err
        return {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.seg")}

    first = log("one", "5")
    assert sum(map(len, first.values())) > 100_000 and log("two", "5") == first
    assert log("three", "6") != first


def test_a_small_trace_gives_the_causes_that_can_be_worked_out_by_hand(tmp_path: Path) -> None:
    """One instance, blocks of 512 tokens, ten seconds apart: each request finds all that an earlier one left."""
    trace = write(
        tmp_path / "t.jsonl",
        mooncake(0, 1024, 1, 2),  # usable 512: cold 512, the last block recomputed
        mooncake(10_000, 1536, 1, 2, 3),  # usable 1024: hit
        mooncake(20_000, 700, 1, 9),  # usable 512: hit; the tail is no full block
        mooncake(30_000, 1024, 1, 2),  # usable 512: hit
    )
    place = (
        "emulate",
        trace.name,
        "-f",
        "mooncake",
        "--tenant",
        "acme",
        "--instances",
        "1",
        "--router",
        "round_robin",
        "--partitions",
        "1",
    )
    sent = document(run(tmp_path, *place, "--json"))
    assert (sent["load"], sent["requests"], sent["bad_records"]) == ("trace t.jsonl", 4, 0)
    assert sent["hit_ratio"] == pytest.approx(2048 / 4284)
    assert document(run(tmp_path, "work", "--until-end", "--json"))["lag"] == 0
    causes = rows(tmp_path, "SELECT cause, sum(tokens) AS n FROM cause_1m WHERE tenant = 'acme' GROUP BY cause HAVING n > 0")
    assert {row["cause"]: row["n"] for row in causes} == {"hit": 2048, "cold": 512, "granularity": 1724}


def test_faults_and_routers_reach_the_events(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", *(mooncake(1000 * i, 1024, 1, 2) for i in range(60)))
    faults = ("--fault", "restart:20:0:5", "--fault", "route:40:weighted_sum:w=0.3", "--fault", "add:50")
    options = ("-f", "mooncake", "--instances", "2", "--router", "round_robin", "--partitions", "1", "--assign-tenants", "zipf:2")
    sent = document(run(tmp_path, "emulate", trace.name, *options, *faults, "--json"))
    assert sent["load"] == "trace t.jsonl (tenants assigned)"
    document(run(tmp_path, "work", "--until-end", "--json"))
    assert rows(tmp_path, "SELECT instance, lifecycle FROM instance_raw WHERE lifecycle != 'heartbeat' ORDER BY ts, seq") == [
        {"instance": instance, "lifecycle": lifecycle}
        for instance, lifecycle in (("p0", "up"), ("p1", "up"), ("p0", "down"), ("p0", "up"), ("p2", "up"))
    ]
    routers = {row["router"] for row in rows(tmp_path, "SELECT DISTINCT router FROM access_raw")}
    assert routers == {"round_robin", "weighted_sum(w=0.3)"}


def test_a_second_emulation_does_not_go_into_a_used_log(tmp_path: Path) -> None:
    """Its time starts anew, so all its rows would be late; who insists is told by the worker."""
    load = ("emulate", "--scenario", "none", "--minutes", "2", "--partitions", "2")
    assert run(tmp_path, *load).code == 0
    refused = run(tmp_path, *load)
    assert refused.code == 2 and "holds events already" in refused.err and "--append" in refused.err
    assert run(tmp_path, *load, "--append").code == 0
    worked = run(tmp_path, "work", "--until-end", "--partitions", "2", "--json")
    counted = document(worked)
    assert counted["late_rows"] > counted["rows"] // 3 and "rows were late" in worked.err


@pytest.mark.kafka
def test_the_commands_give_the_same_rows_over_kafka_as_over_the_local_log(kafka: str, topic: str, tmp_path: Path) -> None:
    load = ("emulate", "--scenario", "none", "--minutes", "2", "--topic", topic, "--partitions", "4", "--json")
    work = ("work", "--topic", topic, "--partitions", "4", "--until-end", "--json")
    through_kafka = ("--kafka", kafka)
    sent = [document(run(tmp_path, *load, *where)) for where in (("--log", "log"), through_kafka)]
    assert sent[0] == sent[1] | {"where": "local log log"} and sent[1]["where"] == f"topic {topic} at {kafka}"
    group = ("--group", f"g.{topic}", "--session-timeout-s", "1")
    local = document(run(tmp_path, *work, "--log", "log", "--store", "chdb://local"))
    carried = document(run(tmp_path, *work, *through_kafka, *group, "--store", "chdb://kafka"))
    for counter in ("records", "rows", "windows", "inserted_rows", "lag"):
        assert carried[counter] == local[counter]
    dumps = [_dump(tmp_path, name) for name in ("local", "kafka")]
    assert dumps[0] == dumps[1] and len(dumps[0]["access_raw"]) == sent[0]["requests"]


def _dump(place: Path, name: str) -> dict[str, list[str]]:
    environment = ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "tests.dump_store", f"chdb://{name}"]
    found: dict[str, list[str]] = json.loads(subprocess.run(command, cwd=place, env=environment, capture_output=True, check=True).stdout)
    return found


# -- attach -----------------------------------------------------------------------------------------------------------------------------


def test_attach_keeps_huge_hashes_and_sets_a_contradictory_row_aside(tmp_path: Path) -> None:
    """The engine of q1 claims more cached tokens than its prompt has; q0, q2 and q3 stay."""
    log = write(
        tmp_path / "log.jsonl",
        dynamo(0, 70, 0, HUGE),
        dynamo(1, 40, 41, HUGE[:2]),
        dynamo(2, 70, 48, HUGE),
        dynamo(3, 33, 32, HUGE[:2]),
    )
    sent = document(run(tmp_path, "attach", log.name, "-f", "dynamo", "--tenant", "acme", "--partitions", "1", "--json"))
    assert sent["rows"] == {"access": 4, "instance": 4} and sent["bad_records"] == 0 and "inferred" in sent["note"]
    worked = document(run(tmp_path, "work", "--until-end", "--json"))
    assert (worked["bad_rows"], worked["bad_records"], worked["lag"]) == (1, 0, 0)
    kept = rows(tmp_path, "SELECT request_id, instance, chain, hit_tokens FROM access_raw ORDER BY ts")
    assert kept == [
        {"request_id": "q0", "instance": str(2**63), "chain": HUGE, "hit_tokens": 0},
        {"request_id": "q2", "instance": str(2**63), "chain": HUGE, "hit_tokens": 48},
        {"request_id": "q3", "instance": str(2**63 + 1), "chain": HUGE[:2], "hit_tokens": 32},
    ]
    (letter,) = rows(tmp_path, "SELECT reason, detail, length(raw) AS bytes FROM dead_letter_raw")
    assert letter["reason"] == "hit_exceeds_prompt" and "row 1 of a access record" in letter["detail"] and letter["bytes"] > 0
    (sums,) = rows(tmp_path, "SELECT sum(tokens) AS prompt, sumIf(tokens, cause = 'hit') AS hit FROM cause_1m")
    assert sums == {"prompt": 173, "hit": 80}


def test_attach_reads_standard_input_and_tells_bad_lines_apart(tmp_path: Path) -> None:
    text = "".join(json.dumps(item) + "\n" for item in (dynamo(0, 40, 0, [1, 2]), dynamo(1, -40, 0, [1, 2]), dynamo(2, 40, 16, [1, 2])))
    done = run(tmp_path, "attach", "-", "-f", "dynamo", "--json", stdin=text)
    assert document(done, code=2) | {"note": ""} == {
        "where": "local log .kvtide/log", "rows": {"access": 2, "instance": 2}, "bad_records": 1, "note": ""
    }  # fmt: skip
    (line,) = done.err.splitlines()
    assert line.startswith("kvtide: <stdin>:2: negative number"), line


# -- mistakes ---------------------------------------------------------------------------------------------------------------------------

TRACE = ("emulate", "t.jsonl", "-f", "mooncake")
BAD_SETTING = ("work", "--log", ".", "--json")
MISTAKES = [
    (BAD_SETTING, "KVTIDE_CHECKPOINT_S='often' is not a float"),
    (("emulate",), "give trace files with --format, or --scenario NAME"),
    (("emulate", "t.jsonl"), "--format is missing"),
    ((*TRACE, "--scenario", "none"), "and not both"),
    (("emulate", "--scenario", "melt"), "'melt' is not one of 'none', 'routing_migration'"),
    (("emulate", "--scenario", "none", "--minutes", "1"), "1.0 is not in the range x>=2"),
    (("emulate", "absent.jsonl", "-f", "mooncake"), "absent.jsonl: no such file or folder"),
    (("emulate", "t.jsonl", "-f", "qwen"), "t.jsonl:1: this is not qwen: it looks like mooncake; use --format mooncake"),
    (("emulate", "empty.jsonl", "-f", "mooncake"), "empty.jsonl: the file is empty"),
    ((*TRACE, "--assign-tenants", "zipf:0"), "'zipf:0' is not of the form zipf:N"),
    ((*TRACE, "--fault", "melt:10:0"), "fault 'melt:10:0': unknown kind 'melt'; write one of restart:AT:I"),
    ((*TRACE, "--fault", "restart:soon:0"), "fault 'restart:soon:0': could not convert string to float: 'soon'"),
    ((*TRACE, "--fault", "restart:10"), "a part is missing"),
    ((*TRACE, "--fault", "capacity:10:inf"), "'inf' is not a finite number"),
    (("emulate", "--scenario", "none", "--fault", "melt"), "a scenario brings its own load and fleet"),
    ((*TRACE, "--fault", "restart:10:9"), "restart: no instance 9 in a fleet of 4"),
    ((*TRACE, "--fault", "route:10:nope"), "unknown router 'nope', have weighted_sum, session_affinity"),
    ((*TRACE, "--router", "nope"), "unknown router 'nope', have weighted_sum, session_affinity"),
    ((*TRACE, "--router", "weighted_sum:w=much"), "router 'weighted_sum:w=much': could not convert string to float"),
    ((*TRACE, "--router", "weighted_sum:w=7"), "w must lie in 0..1"),
    ((*TRACE, "--router", "session_affinity:w=1"), "router 'session_affinity:w=1': "),
    ((*TRACE, "--kafka", "h:1", "--log", "x"), "--kafka and --log exclude each other"),
    (("attach", "t.jsonl", "-f", "mooncake"), "does not say which instance served it"),
    (("attach", "t.jsonl"), "Missing option '--format'"),
    (("work", "--until-end"), "no log of topic kv.events in .kvtide/log; run `kvtide emulate` or `kvtide attach` first"),
    (("work", "--kafka", "h:1", "--log", "x"), "--kafka and --log exclude each other"),
    (("sql", "SELEC 1"), "Syntax error"),
    (("diagnose", "--from", "soon"), "--from 'soon' is not an ISO 8601 time"),
    (("demo", "--minutes", "3"), "3.0 is not in the range x>=12"),
    (("bench", "nope"), "'nope' is not one of 'shard'"),
    (("melt",), "No such command 'melt'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Done]:
    """Every mistake made once, two at a time, each in a folder with a trace and an empty file."""

    def make(arguments: tuple[str, ...]) -> Done:
        place = tmp_path_factory.mktemp("mistake")
        write(place / "t.jsonl", mooncake(0, 1024, 1, 2))
        (place / "empty.jsonl").touch()
        return run(place, *arguments, KVTIDE_CHECKPOINT_S="often" if arguments == BAD_SETTING else "5")

    with ThreadPoolExecutor(2) as pool:
        calls = [arguments for arguments, _ in MISTAKES]
        return dict(zip(calls, pool.map(make, calls), strict=True))


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_a_mistake_is_told_on_stderr_with_code_2_and_nothing_on_stdout(
    arguments: tuple[str, ...], message: str, mistakes: dict[tuple[str, ...], Done]
) -> None:
    done = mistakes[arguments]
    assert (done.code, done.out) == (2, "") and message in done.err


def test_a_bad_line_is_named_and_its_neighbours_go_on(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", mooncake(0, 1024, 1, 2), mooncake(1000, 1024, 1, 2))
    trace.write_text(trace.read_text()[:-20] + "\n" + json.dumps(mooncake(2000, 1024, 1, 2)) + "\n")
    done = run(tmp_path, *TRACE, "--json")
    summary = document(done, code=2)
    assert (summary["requests"], summary["bad_records"]) == (2, 1)
    assert done.err == "kvtide: t.jsonl:2: truncated: the JSON ends early; fetch the file again, or complete or drop this line\n"
    assert run(tmp_path, *TRACE, "--skip-bad", "--log", "other").code == 0


def test_a_broker_that_is_not_there_is_code_1(tmp_path: Path) -> None:
    done = run(tmp_path, "emulate", "--scenario", "none", "--kafka", "127.0.0.1:1", "--json")
    assert (done.code, done.out) == (1, "") and done.err.startswith("kvtide: no Kafka at 127.0.0.1:1") and "check the address" in done.err


# -- demo -------------------------------------------------------------------------------------------------------------------------------


def test_demo_prints_the_documented_document_and_writes_its_report(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--json", "--scenario", "none", "--minutes", "14")
    shown = document(done)
    assert done.err == "" and (shown["injected"], shown["verdict"], shown["synthetic_load"]) == ("none", "none", True)
    change = 100 * (shown["hit_ratio"]["after"] - shown["hit_ratio"]["before"])
    assert sum(shown["contributions"].values()) == pytest.approx(change, abs=1e-6), "percentage points that leave no remainder"
    kinds = [item["kind"].split("_")[0] for item in shown["advice"]]
    assert sorted(kinds) == ["route", "scale"]
    assert all(item["target"] and "hit_ratio" in item["predicted"] for item in shown["advice"])
    page = (tmp_path / "out" / "demo.html").read_text()
    assert page.count("<html") == 1 and ' src="http' not in page and "<link" not in page
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "the store was temporary"


@pytest.fixture(scope="module")
def demos(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Done]]]:
    """The demo of every scenario that is asked for, two at a time."""
    wanted = [item.callspec.params["scenario"] for item in request.session.items if "demos" in getattr(item, "fixturenames", ())]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, tmp_path_factory.mktemp(name), "demo", "--json", "--scenario", name) for name in wanted}


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_demo_finds_what_it_injected(scenario: str, demos: dict[str, Future[Done]]) -> None:
    shown = document(demos[scenario].result())
    assert (shown["injected"], shown["verdict"]) == (scenario, scenario)
    assert shown["load"]["flat"], "the decline must not come with a change of load"
    lost = shown["hit_ratio"]["before"] - shown["hit_ratio"]["after"]
    assert abs(lost) < 0.02 if scenario == "none" else lost > 0.05
    assert {"scale", "route"} == {item["kind"].split("_")[0] for item in shown["advice"]}
