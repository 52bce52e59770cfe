"""The lab: every eviction policy, router or split into tiers on every trace, in cells that run side by side and are never run twice.

A run folder holds the traces as the cells read them and one line for each finished cell, under a key of all that its result depends on:
the trace's content, the cell's own parameters and the source of what it runs. A run that was cut goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from analytics.costs import token_context
from analytics.curve import DistanceHistogram
from analytics.estimators.points import block_values
from analytics.fleet.lab import Cell, run_cell
from analytics.fleet.routers import RouterSpec
from analytics.fleet.workload import Workload
from analytics.policies import POLICIES, Form, leading_hits
from analytics.policies.cursor import Trace, parents, predecessors
from analytics.policies.prefix_aware import absent
from analytics.policies.wa import Mode, modes_of_fits
from analytics.policies.wa_fit import fit_trace
from analytics.reuse.chains import ChainColumns
from analytics.reuse.run_exact import RunStack
from analytics.surfaces import tier_hit_ratios
from analytics.workload import LabelledChains
from ingest.errors import UsageError

F64 = npt.NDArray[np.float64]
Row = dict[str, Any]
# They know of the future: all of it, or the next requests as a job queue would. They win nothing.
BOUNDS = {"belady": "bound", "cached_attention": "given the next 64 requests"}
FINISHED, TRACES = "cells.jsonl", "traces"


@dataclass(frozen=True)
class LabTrace:
    """A trace as cells read it: `trace`, and of every block reference `tokens` and `token_context` (float64[blocks])."""

    name: str
    chains: ChainColumns
    trace: Trace
    tokens: F64
    token_context: F64

    @property
    def distinct(self) -> int:
        """Distinct blocks: the capacity at which everything fits."""
        return int(self.trace.parent.size)


def lab_trace(name: str, labelled: LabelledChains) -> LabTrace:
    """The trace of labelled chains; blocks of different tenants never meet. Raises `UsageError` for a trace without blocks."""
    chains = labelled.private_chains
    if not labelled.has_blocks or not chains.blocks:
        raise UsageError(f"{name} has no block hashes: a cache cannot be simulated on it; choose a trace with blocks")
    ids, distinct = labelled.private
    depth = np.zeros(distinct, np.int32)
    depth[ids[::-1]] = (np.arange(chains.blocks) - np.repeat(chains.offsets[:-1], labelled.lengths))[::-1]
    trace = Trace(
        ids, chains.offsets.astype(np.int64), chains.ts_us, chains.prompt_tokens, labelled.tenant, labelled.session, labelled.category,
        labelled.turn, parents(ids, chains.offsets, distinct), depth, chains.block_size,
    )  # fmt: skip
    return LabTrace(name, chains, trace, *block_values(chains, np.arange(chains.blocks)))


def check_prefixes(held: LabTrace) -> None:
    """Raises `UsageError` where a block stands behind two different blocks, as in a chain that loops."""
    trace = held.trace
    wrong = np.flatnonzero(trace.parent[trace.ids] != predecessors(trace.ids, trace.offsets))
    if wrong.size:
        request = int(np.searchsorted(trace.offsets, wrong[0], side="right")) - 1
        raise UsageError(
            f"{held.name}: request {request + 1} names a block behind another block than before, so its hashes do not commit to their "
            "prefix; use --form plain, or a trace whose hashes are chained"
        )


def capacities_of(text: str, distinct: int) -> list[int]:
    """Capacities in blocks of `100,5%,...`; per cent are of the distinct blocks. Raises `UsageError` for what is neither, or negative."""
    out = []
    for part in text.split(","):
        word = part.strip()
        try:
            size = round(float(word[:-1]) / 100 * distinct) if word.endswith("%") else int(word)
        except (ValueError, OverflowError):
            size = -1
        if size < 0:
            raise UsageError(
                f"--capacities: {word!r} is neither a number of blocks nor per cent of the distinct blocks, for example 1000 or 5%"
            )
        out.append(size)
    return sorted(set(out))


def chosen(text: str | None, registry: Mapping[str, object], what: str) -> list[str]:
    """Names of `a,b`, all of the registry for None. Raises `UsageError` for an unknown one."""
    if text is None:
        return list(registry)
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in registry]
    if unknown:
        raise UsageError(f"{what} {', '.join(map(repr, unknown))} unknown; choose of {', '.join(registry)}")
    return list(dict.fromkeys(names))


# ---------------------------------------------------------------- cells


class Job(Protocol):
    """One cell: where its trace or load is kept, what distinguishes it, and how it is run."""

    @property
    def data(self) -> str: ...

    @property
    def words(self) -> list[Any]: ...

    def run(self) -> list[Row]: ...


@dataclass(frozen=True)
class PolicyJob:
    """One policy, form and capacity (blocks) on one trace; `cost` in s/token and s/token^2."""

    data: str
    trace: str
    policy: str
    form: Form
    capacity_blocks: int
    cost: tuple[float, float]

    @property
    def words(self) -> list[Any]:
        return ["policy", sources_digest("analytics.policies"), self.policy, self.form, self.capacity_blocks, *self.cost]

    def run(self) -> list[Row]:
        """The cell's row. Hits count only where they are prefix-contiguous, in the plain form too. Cost: one walk of the trace."""
        held, policy = prepared(self.data), POLICIES[self.policy]
        trace = held.trace
        if self.form == "plain" and policy.fill is not None:
            hits = policy(trace.ids, held.distinct, self.capacity_blocks)
        else:
            hits = policy.replay(trace, self.capacity_blocks, self.form)
        where = leading_hits(hits, trace.offsets)
        a, b = self.cost
        tokens = float(held.tokens[where].sum())
        return [
            {
                "trace": self.trace,
                "policy": self.policy,
                "form": self.form,
                "capacity_blocks": self.capacity_blocks,
                "hit_ratio_blocks": float(where.sum()) / trace.ids.size,
                "hit_ratio_tokens": tokens / max(float(trace.prompt_tokens.sum()), 1.0),
                "saved_prefill_s": a * tokens + b * float(held.token_context[where].sum()),
            }
        ]


@dataclass(frozen=True)
class RouterJob:
    """One router in one cell of the routers' lab."""

    data: str
    router: str
    cell: Cell

    @property
    def words(self) -> list[Any]:
        cell = self.cell
        return ["router", sources_digest("analytics.fleet"), self.router, cell.instances, cell.load, cell.seed]

    def run(self) -> list[Row]:
        return run_cell(self.cell, prepared(self.data), [RouterSpec(self.router)])


def tier_rows(held: LabTrace, hbm: Sequence[int], dram: Sequence[int], cost: tuple[float, float], inclusive: bool = False) -> list[Row]:
    """What HBM and a DRAM tier below it serve at every pair of capacities, from one exact stack. Cost: one pass, and a look-up a pair."""
    histogram = DistanceHistogram(held.chains.block_size)
    histogram.add(RunStack().touch(held.chains.ts_us, held.chains.offsets, held.chains.hashes), held.chains)
    curve = histogram.curve()
    tokens = tier_hit_ratios(curve, (hbm, dram), inclusive=inclusive, weight="tokens")
    prompts = held.chains.prompt_tokens
    total_s = cost[0] * float(prompts.sum()) + cost[1] * float(token_context(prompts * 0, prompts).sum())
    saved_s = total_s * tier_hit_ratios(curve, (hbm, dram), inclusive=inclusive, weight="cost", cost=cost).sum(axis=0)
    return [
        {
            "trace": held.name,
            "hbm_blocks": first,
            "dram_blocks": second,
            "hbm_hit_ratio_tokens": float(tokens[0, i, j]),
            "dram_hit_ratio_tokens": float(tokens[1, i, j]),
            "hit_ratio_tokens": float(tokens[:, i, j].sum()),
            "saved_prefill_s": float(saved_s[i, j]),
        }
        for i, first in enumerate(hbm)
        for j, second in enumerate(dram)
    ]


# ---------------------------------------------------------------- running


class Lab:
    """A run folder, made where it is not there. Raises `UsageError` where that cannot be."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            (self.folder / TRACES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--run {str(folder)!r} cannot be made: {error.strerror or error}") from error
        self._finished = self._read()

    def keep(self, data: LabTrace | Workload) -> str:
        """Put a trace or load where cells read it, under a name made of its content; returns the path."""
        packed = pickle.dumps(data, protocol=5)
        path = self.folder / TRACES / f"{hashlib.sha256(packed).hexdigest()[:24]}.pickle"
        if not path.exists():
            draft = path.with_suffix(".draft")
            draft.write_bytes(packed)
            draft.replace(path)
        return str(path)

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """The jobs that no run has finished."""
        return [job for job in jobs if key_of(job) not in self._finished]

    def run(self, jobs: Sequence[Job], processes: int, step: Callable[[], None] = lambda: None) -> list[Row]:
        """Rows of all jobs, in their order; those that are not finished run in `processes` fresh processes (1: in this one).

        `step` is called as each ends. What has ended is kept even if the run is cut.
        """
        with (self.folder / FINISHED).open("a", encoding="utf-8") as file:
            for job, rows in _results(self.missing(jobs), processes):
                self._finished[key_of(job)] = rows
                file.write(json.dumps({"key": key_of(job), "rows": rows}) + "\n")
                file.flush()
                step()
        return [row for job in jobs for row in self._finished[key_of(job)]]

    def _read(self) -> dict[str, list[Row]]:
        """Finished cells; a line that a killed run left unfinished is passed over and closed."""
        path, found = self.folder / FINISHED, dict[str, list[Row]]()
        if not path.exists():
            return found
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                one = json.loads(line)
                found[one["key"]] = one["rows"]
            except (ValueError, KeyError, TypeError):
                continue
        return found


def key_of(job: Job) -> str:
    """Key of a cell: of its data's content, its parameters and the source of what it runs."""
    return hashlib.sha256(json.dumps([Path(job.data).stem, *job.words]).encode()).hexdigest()[:24]


def _results(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, list[Row]]]:
    if processes <= 1 or len(jobs) <= 1:
        for job in jobs:
            yield job, job.run()
        return
    pool = ProcessPoolExecutor(min(processes, len(jobs)), mp_context=get_context("spawn"))
    try:
        running = {pool.submit(_run, job): job for job in jobs}
        for done in as_completed(running):
            yield running[done], done.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _run(job: Job) -> list[Row]:
    return job.run()


@cache
def prepared(path: str) -> Any:
    """What `Lab.keep` put there, read once a process."""
    with open(path, "rb") as file:
        return pickle.load(file)  # noqa: S301 - our own file, named by its content


@cache
def sources_digest(package: str) -> str:
    """Digest of a package's source: a result is not that of another version's code."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    digest = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- what the rows say


def wins(rows: Sequence[Row]) -> list[Row]:
    """Of every trace, form and capacity the best policy by tokens and its lead over LRU and the next, in shares of the prompt tokens."""
    out = []
    places = dict.fromkeys((row["trace"], row["form"], row["capacity_blocks"]) for row in rows)
    for trace, form, capacity in places:
        here = {
            row["policy"]: row["hit_ratio_tokens"]
            for row in rows
            if (row["trace"], row["form"], row["capacity_blocks"]) == (trace, form, capacity) and row["policy"] not in BOUNDS
        }
        if here:
            best = max(here.values())
            out.append(
                {
                    "trace": trace,
                    "form": form,
                    "capacity_blocks": capacity,
                    "best": [name for name, value in here.items() if value >= best - 1e-12],
                    "hit_ratio_tokens": best,
                    "over_lru": best - here["lru"] if "lru" in here else None,
                    "over_next": best - max((value for value in here.values() if value < best - 1e-12), default=best),
                }
            )
    return out


def fallbacks(held: LabTrace, policies: Sequence[str]) -> list[Row]:
    """Policies that were LRU on a trace, wholly or in part: for want of columns (`absent`), or, WA, because its fits were refused.

    `lru_ratio` is the share of the requests at which WA's fits left the choice to LRU, `reasons` by mode; its guard, which depends on the
    capacity, comes on top (`analytics.policies.wa.wa_report`). None for other policies.
    """
    out = []
    for name in policies:
        columns = list(absent(held.trace, POLICIES[name].needs))
        reasons = fit_modes(held.trace) if name == "wa" else {}
        if columns or reasons:
            ratio = sum(reasons.values()) if name == "wa" else None
            out.append({"trace": held.name, "policy": name, "absent": columns, "lru_ratio": ratio, "reasons": reasons})
    return out


def fit_modes(trace: Trace) -> dict[str, float]:
    """Share of the requests at which WA's fits leave the choice to LRU, by reason; those that occur. Cost: the fits, O(blocks)."""
    modes = modes_of_fits(fit_trace(trace))
    counts = np.bincount(modes, minlength=len(Mode)) / max(modes.size, 1)
    return {mode.name.lower(): float(counts[mode]) for mode in Mode if mode is not Mode.WA and counts[mode] > 0}
