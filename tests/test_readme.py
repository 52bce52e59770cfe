"""The documents are true: their commands run, their SQL answers, and their tables name what the code has."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import click
import pytest

import sql
from analytics.advisor import advise_scale
from analytics.causes import CAUSES
from analytics.diagnosis import VERDICTS, diagnose
from analytics.fleet.scenarios import SCENARIOS
from ingest.sources import SOURCES
from ingest.store import Store
from kvtide.cli import COMMANDS
from kvtide.commands.analyze import analysis
from kvtide.commands.work import command as work_command
from kvtide.frames import load_frame, load_service, save_advice, save_diagnosis
from kvtide.pipeline import run_embedded
from kvtide.settings import Settings
from kvtide.tracefiles import TraceInput
from kvtide.workload_report import save_profile

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/quickstart.md")
ALL = [*DOCUMENTS, "docs/sql.md", "docs/operations.md", "docs/design.md", "CONTRIBUTING.md", "CHANGELOG.md"]
BROKER = "127.0.0.1:9092"  # what the documents write where a reader puts an address of his own
_FENCE = re.compile(r"(?:^<!-- *(?P<mark>[^\n]*?) *-->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the comment before it (`test: skip WHY`, `test: kafka`, `demo`), its text and its line."""

    language: str
    mark: str
    text: str
    line: int


def blocks(document: str) -> list[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    found = _FENCE.finditer(text)
    return [Block(m["language"], m["mark"] or "", m["text"], text[: m.start()].count("\n") + 1) for m in found]


def script(document: str, mark: str) -> str:
    """One shell script of the document's `sh` blocks with a mark."""
    return "\n".join(block.text for block in blocks(document) if block.language == "sh" and block.mark == mark)


def rows_of(document: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without its head."""
    text = (ROOT / document).read_text(encoding="utf-8")
    section = re.split(rf"^#+ {re.escape(heading)}$", text, flags=re.MULTILINE)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert table, f"{document} has no table below {heading!r}"
    return [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def named(cell: str) -> list[str]:
    """What stands in backticks in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def run(text: str, folder: Path, **env: str) -> str:
    """Run a shell script in `folder` with nothing of kvtide in its environment; returns its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVTIDE_") or name == "KVTIDE_CACHE"}
    python = f"{Path(sys.executable).parent}:{clean['PATH']}"
    done = subprocess.run(
        ["bash", "-eux", "-o", "pipefail", "-c", text],
        cwd=folder,
        env={**clean, "COLUMNS": "80", "PATH": python, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, f"exit {done.returncode}:\n{done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder as a reader has it: a set-up checkout's `.venv`, a trace and a request log under the names that the documents use."""
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    with (tmp_path / "trace.jsonl").open("w") as trace:
        trace.writelines(json.dumps(row) + "\n" for row in mooncake_rows())
    with (tmp_path / "requests.jsonl").open("w") as log:
        log.writelines(json.dumps(row) + "\n" for row in dynamo_rows())
    return tmp_path


def conversations(requests: int, seed: int) -> Iterator[tuple[float, int, list[int]]]:
    """(arrival in s, conversation, chained block ids) of made-up conversations with a shared head, one request every 2 s."""
    draw, chains = random.Random(seed), list[list[int]]()
    fresh = iter(range(1 << 63, 1 << 64))
    head = [next(fresh) for _ in range(3)]
    for i in range(requests):
        if not chains or draw.random() < 0.25:
            chains.append(head + [next(fresh)])
        conversation = draw.randrange(len(chains))
        chains[conversation].extend(next(fresh) for _ in range(draw.randint(1, 3)))
        yield 2.0 * i, conversation, list(chains[conversation])


def mooncake_rows(requests: int = 300) -> Iterator[dict[str, object]]:
    for at_s, _, chain in conversations(requests, seed=1):
        yield {"timestamp": 1000 * at_s, "input_length": 512 * len(chain) - 100, "output_length": 60, "hash_ids": chain}


def dynamo_rows(requests: int = 200) -> Iterator[dict[str, object]]:
    for i, (at_s, conversation, chain) in enumerate(conversations(requests, seed=2)):
        request = {
            "request_id": f"r{i}",
            "model": "m",
            "output_tokens": 20,
            "cached_tokens": 16 * min(3, len(chain) - 1),
            "request_received_ms": 1.7e12 + 1000 * at_s,
            "prefill_wait_time_ms": 1.0,
            "prefill_time_ms": 12.0,
            "ttft_ms": 13.0,
            "worker": {"prefill_worker_id": 1 + conversation % 2, "prefill_dp_rank": 0},
            "replay": {"trace_block_size": 16, "input_length": 16 * len(chain) + 5, "input_sequence_hashes": chain},
        }
        event = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "event_time_unix_ms": 1.7e12 + 1000 * at_s + 500}
        yield {"timestamp": i, "event": {**event, "agent_context": {"session_id": f"s{conversation}"}, "request": request}}


@pytest.mark.slow
@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_runs_in_order(document: str, place: Path) -> None:
    out = run(script(document, ""), place, KVTIDE_PARTITIONS="4")
    assert "kvtide: " not in out.replace("kvtide: no route advice", ""), "a command complained"


@pytest.mark.slow
@pytest.mark.kafka
@pytest.mark.parametrize("document", [document for document in DOCUMENTS if script(document, "test: kafka")])
def test_every_kafka_command_runs_in_order(document: str, place: Path, kafka: str, topic: str) -> None:
    text = script(document, "test: kafka")
    assert BROKER in text
    text = re.sub(r"^python -m kvtide\.devkafka &.*$", ":", text, flags=re.MULTILINE)  # the fixture's broker is one
    run(text.replace(BROKER, kafka), place, KVTIDE_TOPIC=topic, KVTIDE_GROUP=topic, KVTIDE_PARTITIONS="4")


@pytest.mark.kafka
def test_development_broker_prints_its_address_and_stops_when_told(kafka: str) -> None:
    with subprocess.Popen([sys.executable, "-m", "kvtide.devkafka"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as broker:
        assert broker.stdout is not None
        try:
            assert re.fullmatch(r"127\.0\.0\.1:\d+\n", broker.stdout.readline())
        finally:
            broker.send_signal(signal.SIGTERM)
        assert broker.wait(30) == 0


@pytest.mark.slow
def test_demo_prints_what_the_readme_shows(place: Path) -> None:
    (shown,) = (block.text for block in blocks("README.md") if block.mark == "demo")
    out = run("kvtide demo", place)
    said = iter(out.splitlines())
    for line in shown.splitlines():
        assert any(_worded(line) == _worded(other) for other in said), f"{line!r} is not (or not there) in:\n{out}"
    hit = [[float(x) for x in re.search(r"Hit ratio ([\d.]+)% -> ([\d.]+)%", text).groups()] for text in (shown, out)]  # type: ignore[union-attr]
    assert hit[0] == pytest.approx(hit[1], abs=1.0)
    page = (place / "out" / "demo.html").read_text(encoding="utf-8")
    assert "routing_migration" in page and not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=.http", page), "the page stands alone"


def _worded(line: str) -> str:
    return re.sub(r"[\d.]+", "#", line).strip()


def test_skipped_blocks_are_those_that_set_up_a_machine() -> None:
    skipped = [block for document in DOCUMENTS for block in blocks(document) if block.mark.startswith("test: skip")]
    for block in skipped:
        for line in filter(None, block.text.splitlines()):
            assert re.match(r"(make (demo|test)|git clone|cd|docker) ?", line), f"{line!r} (line {block.line}) must be run"
    marks = {block.mark for document in DOCUMENTS for block in blocks(document) if block.language == "sh"} - {b.mark for b in skipped}
    assert marks <= {"", "test: kafka"}


def test_links_between_documents_lead_somewhere() -> None:
    for document in ALL:
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"


def test_readme_names_every_format_scenario_and_folder() -> None:
    rows = rows_of("README.md", "Your traces and logs")
    assert sorted(name for row in rows for name in named(row[0])) == sorted(SOURCES)
    for row in rows:
        has_blocks = {SOURCES[name].has_blocks for name in named(row[0])}
        assert has_blocks == {row[3].startswith("yes")}, row
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text or f"--scenario {name}" in text for name in SCENARIOS if name != "routing_migration")
    folders = [name for row in rows_of("README.md", "Folders") for name in named(row[0])]
    assert all((ROOT / name).is_dir() for name in folders)


def test_operations_lists_every_setting_and_option_of_work() -> None:
    rows = {named(row[0])[0]: (row[1].strip("`"), row[2]) for row in rows_of("docs/operations.md", "Settings")}
    listed = {f"KVTIDE_{f.name.upper()}": (str(f.default), f.metadata["help"]) for f in fields(Settings)}
    assert rows == listed
    options = {name for row in rows_of("docs/operations.md", "Options of `kvtide work`") for name in named(row[0])}
    assert options == {name for option in work_command.params if isinstance(option, click.Option) for name in option.opts}


def test_design_and_sql_name_every_cause_and_verdict() -> None:
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    assert not [name for name in VERDICTS if f"`{name}`" not in design]
    causes = {name for row in rows_of("docs/design.md", "5. Causes: every prompt token is accounted for") for name in row[0].split(" / ")}
    assert {*causes, "hit", "granularity", "beyond"} == set(CAUSES)
    assert {name for row in rows_of("docs/sql.md", "Causes") for name in named(row[0])} == set(CAUSES)


def test_every_command_is_named_in_a_document() -> None:
    text = "".join((ROOT / document).read_text(encoding="utf-8") for document in ALL)
    assert not [name for name in COMMANDS if f"kvtide {name}" not in text]


def test_sql_document_lists_every_table_view_column_and_query(store: Store) -> None:
    columns: dict[str, list[str]] = {}
    for row in store.rows("SELECT table, name FROM system.columns WHERE database = currentDatabase() ORDER BY table, position"):
        columns.setdefault(row["table"], []).append(row["name"])
    # A view with parameters has columns only where it has values.
    between = "from = '2025-01-01 00:00:00', to = '2025-01-02 00:00:00'"
    for view, arguments in {
        "mrc": f"tenant = '', {between}, weight = 'cost'",
        "mrc_placed": f"tenant = '', {between}, weight = 'cost'",
        "capacity_value": f"tenant = '', {between}, scope = 'fleet', a_s = 1, b_s = 1, block_bytes = 1",
        "working_set": f"tenant = '', {between}",
        "pooled_curve": f"instance = '', {between}",
    }.items():
        columns[view] = store.fetch(f"SELECT * FROM {view}({arguments})").columns
    text = (ROOT / "docs/sql.md").read_text(encoding="utf-8")
    headings = re.findall(r"^### `(\w+)`$", text, re.MULTILINE)
    assert sorted(headings) == sorted(columns)
    for table, names in columns.items():
        documented = [name for row in rows_of("docs/sql.md", f"`{table}`") for name in named(row[0])]
        assert documented == names, table
    queries = {named(row[0])[0]: row[1] for row in rows_of("docs/sql.md", "Named queries")}
    assert queries == {name: query.title for name, query in sql.queries().items()}


@pytest.mark.slow
def test_every_sql_block_answers_on_a_filled_store(store: Store, tmp_path: Path) -> None:
    case = SCENARIOS["noisy_neighbour"](0, 12)
    run_embedded(case.fleet(with_truth=False).run(), store, tmp_path / "log")
    frame = load_frame(store)
    found = diagnose(frame)
    save_diagnosis(store, found, 0)
    scale = advise_scale(frame, frame.mask(found.current), load_service(store, found.current))
    assert scale is not None
    save_advice(store, [scale.row(0)])
    rows = [{"timestamp": 1000 * k, "input_length": 1024, "output_length": 1, "hash_ids": [0, k % 7]} for k in range(40)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_profile(store, analysis(TraceInput((str(tmp_path / "trace.jsonl"),), "mooncake", None, None, None, False, False), (1e-4, 1e-8)))
    wanted = [block for block in blocks("docs/sql.md") if block.language == "sql"]
    assert len(wanted) >= 10
    for block in wanted:
        result = store.fetch(block.text)
        assert bool(result.rows) == (block.mark != "test: no rows"), f"docs/sql.md:{block.line}: {len(result.rows)} rows"
    for text in re.findall(r"[`\"](SELECT [^`\"]+)[`\"]", (ROOT / "docs/operations.md").read_text(encoding="utf-8")):
        assert store.fetch(text).columns, text
