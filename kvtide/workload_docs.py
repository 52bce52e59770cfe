"""Figures and pictures of docs/workloads.md, made by `kvtide analyze`'s own code: `python -m kvtide.workload_docs TRACES [NAME...]`.

The document is written by hand but for its one table of figures, of which each trace has a column, and for what stands between
`<!-- NAME -->` and `<!-- end NAME -->`. A test makes both again and compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from analytics.workload import flatten
from kvtide.commands.analyze import DEFAULT_COST, analysis, parse_cost
from kvtide.tracefiles import TraceInput
from kvtide.workload_panels import panels, svg
from kvtide.workload_report import shown

DOCUMENT = Path(__file__).parents[1] / "docs" / "workloads.md"

# Name of each documented trace: where it lies in the folder of public traces, and its format.
TRACES: dict[str, tuple[str, str]] = {
    "conversation": ("mooncake/conversation_trace.jsonl.zst", "mooncake"),
    "synthetic": ("mooncake/synthetic_trace.jsonl.zst", "mooncake"),
    "arxiv-1000": ("mooncake/mooncake_trace_1000.jsonl.zst", "mooncake"),
    "weka": ("weka-claude-code/traces_710.tar.zst", "weka"),
    "ragpulse": ("ragpulse/0_trace.jsonl", "ragpulse"),
    "dynamo": ("dynamo/pi_request_trace.jsonl.gz", "dynamo"),
    "azure-code": ("azure/azure_code.csv", "azure"),
    "azure-conv": ("azure/azure_conv.csv", "azure"),
}
_MARK = "<!-- figures -->"

# Rows of the table: what it is called there, and where it stands in the JSON document.
ROWS: dict[str, str] = {
    "requests": "requests",
    "block references": "blocks",
    "distinct blocks": "distinct_blocks",
    "tokens a block": "block_size",
    "mean prompt, tokens": "mean_prompt_tokens",
    "mean output, tokens": "mean_output_tokens",
    "span, s": "span_s",
    "requests/s": "arrivals.rate_per_s",
    "gap CV": "arrivals.gap_cv",
    "dispersion 1 s": "arrivals.dispersion_1s",
    "dispersion 10 s": "arrivals.dispersion_10s",
    "dispersion 60 s": "arrivals.dispersion_60s",
    "peak/mean 60 s": "arrivals.peak_to_mean_60s",
    "ideal hit ratio, blocks": "ideal.hit_blocks_ratio",
    "ideal, tokens": "ideal.hit_tokens_ratio",
    "ideal, prefill cost": "ideal.hit_prefill_cost_ratio",
    "90 % of ideal, blocks": "capacity.for_90pct_of_ideal_blocks",
    "95 % of ideal, blocks": "capacity.for_95pct_of_ideal_blocks",
    "99 % of ideal, blocks": "capacity.for_99pct_of_ideal_blocks",
    "90 % of ideal, of distinct": "capacity.for_90pct_of_ideal_distinct_ratio",
    "LRU hit at 1 % of distinct": "capacity.hit_blocks_at_1pct_of_distinct_ratio",
    "LRU hit at 10 % of distinct": "capacity.hit_blocks_at_10pct_of_distinct_ratio",
    "LRU hit at 50 % of distinct": "capacity.hit_blocks_at_50pct_of_distinct_ratio",
    "blocks touched once": "one_touch.distinct_ratio",
    "references touched once": "one_touch.references_ratio",
    "top block, of references": "one_touch.top_block_references_ratio",
    "reuses of top 1 % of blocks": "skew.reuses_of_top_1pct_blocks_ratio",
    "reuses of top 10 % of blocks": "skew.reuses_of_top_10pct_blocks_ratio",
    "requests getting 90 % of hits": "skew.requests_getting_90pct_ratio",
    "requests giving 90 % of reuses": "skew.requests_giving_90pct_ratio",
    "sessions": "turns.sessions",
    "turns P50": "turns.turns_p50",
    "turns P90": "turns.turns_p90",
    "turns max": "turns.turns_max",
    "single-turn requests": "turns.single_turn_requests_ratio",
    "single-turn share of hits": "turns.single_turn_hits_ratio",
    "hits within session": "session_sharing.within_session_hits_ratio",
    "hits within conversation": "session_sharing.within_conversation_hits_ratio",
    "hits across conversations": "session_sharing.cross_conversation_hits_ratio",
    "reuse time P50, s": "reuse_time.p50_s",
    "reuse time P80, s": "reuse_time.p80_s",
    "reuse time P90, s": "reuse_time.p90_s",
    "lifespan P90, s": "lifespan.all_p90_s",
    "lifespan of reused P50, s": "lifespan.reused_p50_s",
    "lifespan of reused P99, s": "lifespan.reused_p99_s",
    "templates found": "templates.found",
    "hits within templates": "templates.share_of_hits_ratio",
    "tokens seen at any position": "any_position.any_position_tokens_ratio",
}


def analyse(folder: Path, name: str) -> dict[str, Any]:
    """The document that `kvtide analyze --json` prints for a documented trace."""
    path, format_ = TRACES[name]
    trace = TraceInput((str(folder / path),), format_, None, None, None, False, False)
    return analysis(trace, parse_cost(DEFAULT_COST))


def column(result: dict[str, Any]) -> list[str]:
    """The trace's column of the table, from top to bottom; - for what it cannot tell."""
    known = {row.metric: row.value for row in flatten(result["characterisation"]) if not row.label}
    values = [known.get(path) if "." in path else result[path] for path in ROWS.values()]
    if result["ideal_hit_ratio"] is None:
        values[1:3] = [None, None]
    return [shown(value, path) for value, path in zip(values, ROWS.values(), strict=True)]


def detail(result: dict[str, Any]) -> str:
    """Templates, categories and reasons of one trace, as Markdown."""
    found = result["characterisation"]
    parts = []
    if found["templates"] and found["templates"]["heads"]:
        counted = found["templates"]["counted"]
        keys = tuple(dict.fromkeys(("length_tokens", "requests_ratio", f"{counted}_ratio")))
        parts.append(_table(found["templates"]["heads"][:5], keys, "shared head"))
    if found["categories"]:
        figures = ("requests", "reuse_ratio", "p50_s", "p90_s", "exponential_mean_s", "ks_distance_ratio")
        parts.append(_table(found["categories"][:10], figures, "category"))
    reasons: dict[str, list[str]] = {}
    for metric, reason in found["unknown"].items():
        reasons.setdefault(reason, []).append(f"`{metric}`")
    if reasons:
        parts.append("Cannot tell: " + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in reasons.items()) + ".")
    return "\n\n".join(parts)


def read_table(text: str) -> dict[str, list[str]]:
    """Columns of the document's table by trace, in the order of `ROWS`."""
    lines = [line for line in text.partition(_MARK)[2].strip().split("\n\n")[0].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = {row[0]: row[1:] for row in cells[2:]} if cells else {}
    return {name: [rows[label][k] for label in ROWS] for k, name in enumerate(cells[0][1:])} if rows.keys() == ROWS.keys() else {}


def read_detail(text: str, name: str) -> str:
    """What stands between a trace's marks."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- end {name} -->", text, re.DOTALL)
    return found[1].strip() if found else ""


def updated(text: str, name: str, result: dict[str, Any]) -> str:
    """The document with one trace's column and details made anew."""
    columns = read_table(text) | {name: column(result)}
    order = [known for known in TRACES if known in columns]
    lines = ["| | " + " | ".join(order) + " |", "|---|" + "---:|" * len(order)]
    lines += ["| " + " | ".join([label, *(columns[known][k] for known in order)]) + " |" for k, label in enumerate(ROWS)]
    before, _, after = text.partition(_MARK)
    rest = after.lstrip("\n").partition("\n\n")[2] if after.lstrip("\n").startswith("|") else after.lstrip("\n")
    text = f"{before}{_MARK}\n\n" + "\n".join(lines) + f"\n\n{rest}"
    return re.sub(
        rf"<!-- {name} -->\n.*?<!-- end {name} -->",
        lambda _: f"<!-- {name} -->\n\n{detail(result)}\n\n<!-- end {name} -->",
        text,
        flags=re.DOTALL,
    )


def picture(result: dict[str, Any]) -> str:
    """The trace's plots as one SVG."""
    return svg(panels(result["characterisation"]))


def main(folder: str, *names: str) -> None:
    """Make the named traces' figures anew (all without a name)."""
    for name in names or TRACES:
        result = analyse(Path(folder), name)
        DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8"), name, result), encoding="utf-8")
        target = DOCUMENT.parent / "workloads" / f"{name}.svg"
        target.parent.mkdir(exist_ok=True)
        target.write_text(picture(result), encoding="utf-8")


def _table(rows: list[dict[str, Any]], keys: tuple[str, ...], first: str) -> str:
    head = " | ".join(key.removesuffix("_ratio").replace("_", " ") for key in keys)
    lines = [f"| {first} | {head} |", "|---|" + "---:|" * len(keys)]
    return "\n".join([*lines, *(f"| {row['label']} | " + " | ".join(shown(row[key], key) for key in keys) + " |" for row in rows)])


if __name__ == "__main__":
    main(*sys.argv[1:])
