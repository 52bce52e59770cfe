"""The characterisation of a trace as one nested document, and the same flattened into (metric, label, value, unit) rows.

What a trace cannot tell is None, and `unknown` says why; it is never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from analytics.curve import Curve
from analytics.estimators.exact import run_exact
from analytics.workload.hits import capacity, ideal, one_touch, session_sharing, skew, tenant_sharing
from analytics.workload.labels import LabelledChains, touches
from analytics.workload.places import any_position, positions, templates
from analytics.workload.times import arrivals, categories, lifespans, reuse_times
from analytics.workload.turns import turns

NO_BLOCKS = "the trace has no block hashes"
NO_CLOCK = "sessions have no common clock; their start times are given, not observed"
NO_SESSIONS = "the trace names no sessions"
ONE_TENANT = "the trace has one tenant; --assign-tenants draws several"
LOCAL_IDS = "block ids mean nothing outside their conversation"
CHAINED = "the trace's hashes commit to everything before a block"
NOTHING = "there was nothing of which it could be a share or a quantile"
NO_CATEGORIES = "the trace has neither types nor turns"

OF_BLOCKS = (
    "ideal", "one_touch", "skew", "tenant_sharing", "session_sharing", "turns", "reuse_time", "categories", "position", "lifespan",
    "capacity", "templates", "any_position",
)  # fmt: skip
UNITS = ("ratio", "s", "blocks", "tokens")


class Metric(NamedTuple):
    """One figure: `metric` is its path, `label` the row it belongs to ('' for none), `unit` the last word of its name or ''."""

    metric: str
    label: str
    value: float | None
    unit: str


def characterise(
    trace: LabelledChains, cost: tuple[float, float], *, curve: Curve | None = None, step: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Everything that the trace tells: one entry a theme, `assumptions` that go into them, and `unknown` with reasons for what is None.

    `cost` is the prefill cost (a s/token, b s/token^2); `curve` the exact LRU curve where it is at hand already; `step` is told what is
    worked on. Raises `ValueError` for a trace without requests. Cost: about ten passes over the references, some 0.1 us each a block.
    """
    if not trace.chains.requests:
        raise ValueError("a trace without requests cannot be characterised")
    found: dict[str, Any] = {"arrivals": None} | dict.fromkeys(OF_BLOCKS)
    unknown: dict[str, str] = {}
    if trace.has_clock:
        found["arrivals"], unknown = arrivals(trace.chains.ts_us)
    else:
        unknown["arrivals"] = NO_CLOCK
    if trace.has_blocks and trace.chains.blocks:
        for name, make in _themes(trace, cost, curve, unknown):
            step(name)
            found[name] = make()
    else:
        unknown |= {name: NO_BLOCKS for name in OF_BLOCKS if name != "turns"} | _sessions_of_load(trace, found)
    if found["session_sharing"] and trace.local_ids:
        unknown["session_sharing.cross_conversation_hits_ratio"] = LOCAL_IDS
    for metric in flatten(found):
        if metric.value is None and metric.metric not in unknown and metric.metric.partition(".")[0] not in unknown:
            unknown[metric.metric] = NOTHING
    return {**found, "assumptions": _assumptions(trace, cost), "unknown": unknown}


def _themes(
    trace: LabelledChains, cost: tuple[float, float], curve: Curve | None, unknown: dict[str, str]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and maker of every theme that the trace can tell of; the others go into `unknown`."""
    ids, distinct = trace.private
    touched = touches(ids, trace.chains.offsets, distinct, trace.chains.ts_us)
    sessions = bool((trace.session >= 0).any())
    labelled = bool((trace.category >= 0).any() or (trace.turn > 0).any())
    makers: list[tuple[str, Callable[[], Any], str | None]] = [
        ("ideal", lambda: ideal(trace, cost), None),
        ("one_touch", lambda: one_touch(touched.requests, trace.chains.blocks), None),
        ("skew", lambda: skew(trace, touched), None),
        ("tenant_sharing", lambda: tenant_sharing(trace), None if len(trace.tenants) > 1 else ONE_TENANT),
        ("session_sharing", lambda: session_sharing(trace), None if sessions else NO_SESSIONS),
        ("turns", lambda: turns(trace), None if sessions else NO_SESSIONS),
        ("reuse_time", lambda: reuse_times(trace), None),
        ("categories", lambda: categories(trace), None if labelled else NO_CATEGORIES),
        ("position", lambda: positions(trace), None),
        ("lifespan", lambda: lifespans(touched), None),
        ("capacity", lambda: capacity(run_exact(trace.private_chains) if curve is None else curve, distinct), None),
        ("templates", lambda: templates(trace), LOCAL_IDS if trace.local_ids else None),
        ("any_position", lambda: any_position(trace), CHAINED if trace.content is None else None),
    ]
    for name, make, reason in makers:
        if reason is None:
            yield name, make
        else:
            unknown[name] = reason


def _sessions_of_load(trace: LabelledChains, found: dict[str, Any]) -> dict[str, str]:
    """Turns where sessions are named though blocks are not: what concerns hits stays None."""
    if not (trace.session >= 0).any():
        return {"turns": NO_SESSIONS}
    known = turns(trace)
    found["turns"] = {name: None if "hit" in name else value for name, value in known.items()}
    return {f"turns.{name}": NO_BLOCKS for name in known if "hit" in name}


def _assumptions(trace: LabelledChains, cost: tuple[float, float]) -> list[str]:
    said = [
        f"prefill cost: {cost[0]:g} s a token and {cost[1]:g} s a token squared",
        "input blocks only: what decode adds is not in a trace",
    ]
    if trace.tenants_assigned:
        said.append("tenants are assigned, not observed")
    if not trace.has_clock:
        said.append("capacity: sessions overlap as their given start times say")
    return said


def flatten(document: dict[str, Any]) -> Iterator[Metric]:
    """Rows of a characterisation in long form, None values included; text, `assumptions` and `unknown` are left out."""
    for theme, found in document.items():
        if theme not in ("assumptions", "unknown"):
            yield from _rows(theme, "", found)


def _rows(path: str, label: str, found: Any) -> Iterator[Metric]:
    if isinstance(found, dict):
        for name, value in found.items():
            if name != "label":
                yield from _rows(f"{path}.{name}", label, value)
    elif isinstance(found, list):
        for item in found:
            yield from _rows(path, item["label"], item)
    elif found is None or isinstance(found, int | float):
        last = path.rpartition("_")[2]
        yield Metric(path, label, None if found is None else float(found), last if last in UNITS else "")
