"""Window accumulators: the touched runs and cause segments of one minute become rows of the `*_1m` tables.

Everything is added up in integers (or in half-integers that a float64 holds exactly), so the order of addition cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit
from numpy.typing import NDArray

from analytics.causes import CAUSES
from analytics.reuse.bins import N_BINS, bin_edges, bin_of, edges_of
from analytics.reuse.run_exact import Runs

Strings = Sequence[str]
_EDGES = np.stack(edges_of(np.arange(N_BINS, dtype=np.int32)), axis=1).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows for one table: `key` names the closed window (part of the insert token)."""

    table: str
    key: str
    data: pa.Table


@dataclass(slots=True)
class Columns:
    """Column pieces of one table that grow block by block and end as one Arrow table.

    A column is given either always as one value for a whole piece or always as an array of a value a row.
    """

    names: tuple[str, ...]
    lengths: list[int] = field(default_factory=list)
    pieces: list[dict[str, Any]] = field(default_factory=list)

    def add(self, n: int, **columns: Any) -> None:
        """Append `n` rows; nothing happens when `n` is 0."""
        if n:
            self.lengths.append(n)
            self.pieces.append(columns)

    def table(self) -> pa.Table | None:
        """All rows, or None without any. Cost: one gather a column, however many pieces."""
        if not self.lengths:
            return None
        piece_of = pa.array(np.repeat(np.arange(len(self.lengths)), self.lengths))
        return pa.table({name: _column([piece[name] for piece in self.pieces], piece_of) for name in self.names})


def _column(pieces: list[Any], piece_of: pa.Array) -> pa.Array:
    first = pieces[0]
    if isinstance(first, pa.Array):
        return pa.concat_arrays(pieces)
    if isinstance(first, np.ndarray):
        values = np.concatenate(pieces)
        return pa.array(values.astype(np.uint64) if values.dtype == np.int64 else values)
    return pa.array(pieces, pa.string() if isinstance(first, str) else pa.uint64()).take(piece_of)


REUSE = ("tenant", "model", "block_size", "scope", "instance", "kind", "distance_from", "distance_to", "blocks", "positions")
REUSE_TIME = ("tenant", "model", "block_size", "instance", "category", "kind", "reuse_ms_from", "reuse_ms_to", "blocks", "positions")
CAUSE = ("tenant", "model", "instance", "cause", "cause_tenant", "inferred", "requests", "blocks", "tokens", "token_context")


def add_reuse(out: Columns, runs: Runs, **place: Any) -> None:
    """Distance histogram of one stack's runs; `place` gives tenant, model, block_size, scope, instance. Cost: O(runs + bins)."""
    reused = runs.distance >= 0
    blocks, positions = _distance_histogram(runs.distance[reused], runs.length[reused], runs.position[reused])
    bins = np.flatnonzero(blocks)
    lo, hi = _EDGES[bins, 0], _EDGES[bins, 1]
    out.add(len(bins), kind="reuse", distance_from=lo, distance_to=hi, blocks=blocks[bins], positions=positions[bins], **place)
    cold = ~reused
    length, first, beyond = (a[cold].astype(np.int64) for a in (runs.length, runs.position, runs.beyond))
    for kind, n, start in (("beyond", beyond, first), ("cold", length - beyond, first + beyond)):
        total = int(n.sum())
        spots = int((n * start + n * (n - 1) // 2).sum())
        out.add(int(total > 0), kind=kind, **_one(distance_from=0, distance_to=0, blocks=total, positions=spots), **place)


def add_reuse_times(out: Columns, runs: Runs, category: NDArray[np.int64], categories: Strings, **place: Any) -> None:
    """Reuse-time histogram of placed runs per category (code per access); cold blocks are one row a category."""
    run_category = category[runs.request] if len(runs.request) else np.zeros(0, np.int64)
    length, first = runs.length.astype(np.int64), runs.position.astype(np.int64)
    spots = length * first + length * (length - 1) // 2
    for code, name in enumerate(categories):
        mine = run_category == code
        reused = mine & (runs.age_us >= 0)
        blocks, positions = _time_histogram(runs.age_us[reused] // 1000, length[reused], spots[reused])
        bins = np.flatnonzero(blocks)
        out.add(
            len(bins),
            category=name,
            kind="reuse",
            reuse_ms_from=_EDGES[bins, 0],
            reuse_ms_to=_EDGES[bins, 1],
            blocks=blocks[bins],
            positions=positions[bins],
            **place,
        )
        cold = mine & (runs.age_us < 0)
        n = int(length[cold].sum())
        counts = _one(reuse_ms_from=0, reuse_ms_to=0, blocks=n, positions=int(spots[cold].sum()))
        out.add(int(n > 0), category=name, kind="cold", **counts, **place)


def _one(**values: int) -> dict[str, NDArray[np.int64]]:
    """Columns of a single row."""
    return {name: np.array([value], np.int64) for name, value in values.items()}


def add_causes(
    out: Columns,
    *,
    instance: NDArray[np.int64],
    cause: NDArray[np.int64],
    tenant: NDArray[np.int64],
    inferred: NDArray[np.int64],
    access: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    block_size: int,
    instances: Strings,
    tenants: Strings,
    tenant_name: str,
    model: str,
) -> None:
    """Segments of one (tenant, model) grouped by instance, cause, cause tenant (code, -1 for none) and inferred."""
    if not len(cause):
        return
    key = ((instance * len(CAUSES) + cause) * (len(tenants) + 1) + tenant + 1) * 2 + inferred
    groups, group = np.unique(key, return_inverse=True)
    tokens = _sums(group, end - start, len(groups))
    # tokens * mean tokens before them = (end^2 - start^2) / 2: kept doubled in integers until the last step.
    doubled = _sums(group, end * end - start * start, len(groups))
    requests = np.unique(group * (access.max() + 1) + access) // (access.max() + 1)
    code = groups // 2
    who = code % (len(tenants) + 1)
    rest = code // (len(tenants) + 1)
    out.add(
        len(groups),
        instance=_take(instances, rest // len(CAUSES)),
        cause=_take(CAUSES, rest % len(CAUSES)),
        cause_tenant=_take(["", *tenants], who),
        inferred=(groups % 2).astype(np.uint8),
        requests=np.bincount(requests, minlength=len(groups)).astype(np.uint64),
        blocks=(tokens // block_size).astype(np.uint64),
        tokens=tokens.astype(np.uint64),
        token_context=doubled / 2.0,
        tenant=tenant_name,
        model=model,
    )


def _take(names: Strings, codes: NDArray[np.int64]) -> pa.Array:
    return pa.array(list(names), pa.string()).take(pa.array(codes))


def _sums(group: NDArray[np.int64], values: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    total = np.zeros(n, np.int64)
    np.add.at(total, group, values)
    return total


@njit(cache=True, nogil=True)
def _distance_histogram(distance, length, position):  # type: ignore[no-untyped-def]
    """Blocks and summed positions per distance bin: O(1) difference-array writes per run, one pass over the bins."""
    blocks, positions = np.zeros(N_BINS, np.int64), np.zeros(N_BINS, np.int64)
    cover, offset = np.zeros(N_BINS + 1, np.int64), np.zeros(N_BINS + 1, np.int64)
    for i in range(len(distance)):
        d, m, p = int(distance[i]), int(length[i]), int(position[i])
        first, last = bin_of(d), bin_of(d + m - 1)
        if first == last:
            blocks[first] += m
            positions[first] += m * p + m * (m - 1) // 2
            continue
        head = bin_edges(first)[1] - d
        tail = d + m - bin_edges(last)[0]
        blocks[first] += head
        positions[first] += head * p + head * (head - 1) // 2
        blocks[last] += tail
        start = p + m - tail
        positions[last] += tail * start + tail * (tail - 1) // 2
        cover[first + 1] += 1
        cover[last] -= 1
        # Inside a fully covered bin a block at distance x has position x + (p - d).
        offset[first + 1] += p - d
        offset[last] -= p - d
    covers, offsets = np.int64(0), np.int64(0)
    for b in range(N_BINS):
        covers += cover[b]
        offsets += offset[b]
        if covers:
            lo, hi = bin_edges(b)
            width = hi - lo
            blocks[b] += covers * width
            positions[b] += offsets * width + covers * (lo * width + width * (width - 1) // 2)
    return blocks, positions


@njit(cache=True, nogil=True)
def _time_histogram(age_ms, length, spots):  # type: ignore[no-untyped-def]
    blocks, positions = np.zeros(N_BINS, np.int64), np.zeros(N_BINS, np.int64)
    for i in range(len(age_ms)):
        b = bin_of(int(age_ms[i]))
        blocks[b] += length[i]
        positions[b] += spots[i]
    return blocks, positions
