"""A workload: requests with their prompts' block hashes as flat (CSR) columns, ready for kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]


class Blocks(NamedTuple):
    """Dense ids of the distinct (tenant, hash) pairs, in order of first appearance, and what each stands for."""

    ids: Codes  # of every entry of `Workload.hashes`
    hashes: Hashes  # of every dense id
    tenants: Codes
    positions: Codes


def numbered_id(index: int) -> str:
    """Request id `r<index>`, for loads whose source names no requests."""
    return f"r{index}"


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests in order of arrival; request `k` asks for the chain `hashes[offsets[k]:offsets[k + 1]]`.

    `hashes` holds full blocks only: at most `prompt_tokens // block_size` a request. `session` and `category` are codes into
    `sessions` and `categories`, -1 where unknown; `turn` counts from 1, 0 where unknown. `arrived_at_us` counts from the start of the
    emulation. `origin` says where the load comes from (`synthetic` for generated ones). Raises `ValueError` for columns that disagree.
    """

    arrived_at_us: Ints
    tenant: Codes
    tenants: tuple[str, ...]
    prompt_tokens: Ints
    output_tokens: Ints
    block_size: int
    offsets: Ints
    hashes: Hashes
    session: Codes
    sessions: tuple[str, ...] = ()
    category: Codes | None = None
    categories: tuple[str, ...] = ()
    turn: Codes | None = None
    model: str = "model"
    request_ids: Callable[[int], str] | tuple[str, ...] = numbered_id
    origin: str = "trace"

    def __post_init__(self) -> None:
        n = len(self.arrived_at_us)
        if self.category is None:
            object.__setattr__(self, "category", np.full(n, -1, np.int32))
        if self.turn is None:
            object.__setattr__(self, "turn", np.zeros(n, np.int32))
        columns = (self.tenant, self.prompt_tokens, self.output_tokens, self.session, self.category, self.turn)
        if any(column is None or len(column) != n for column in columns) or len(self.offsets) != n + 1:
            raise ValueError("columns differ in length")
        if n and (np.any(np.diff(self.arrived_at_us) < 0) or self.arrived_at_us[0] < 0):
            raise ValueError("arrivals must not be negative nor run backwards")
        if self.block_size < 1 or self.offsets[-1] != len(self.hashes):
            raise ValueError("block_size must be positive and offsets must end at len(hashes)")
        lengths = np.diff(self.offsets)
        if np.any(lengths < 0) or np.any(lengths > self.prompt_tokens // self.block_size):
            raise ValueError("a chain holds more blocks than its prompt has full ones")

    def __len__(self) -> int:
        return len(self.arrived_at_us)

    @cached_property
    def blocks(self) -> Blocks:
        """Dense ids over (tenant, hash), worked out once. Cost: O(len(hashes)), about 30 ns a block."""
        owner = np.repeat(self.tenant, np.diff(self.offsets)).astype(np.int32)
        position = (np.arange(len(self.hashes)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))).astype(np.int32)
        ids, first = _dense_ids(np.ascontiguousarray(self.hashes), owner)
        return Blocks(ids, self.hashes[first], owner[first], position[first])

    @property
    def span_s(self) -> float:
        """Seconds from the start of the emulation to the last arrival."""
        return float(self.arrived_at_us[-1]) / 1e6 if len(self) else 0.0

    def chain(self, request: int) -> Hashes:
        """Hashes of one request's full blocks, in order."""
        return self.hashes[self.offsets[request] : self.offsets[request + 1]]

    def request_id(self, request: int) -> str:
        """The source's id of one request."""
        return self.request_ids(request) if callable(self.request_ids) else self.request_ids[request]

    def slice_time(self, from_s: float = 0.0, to_s: float = float("inf"), rebase: bool = False) -> Workload:
        """Requests that arrive in [from_s, to_s); with `rebase` their times count from `from_s`."""
        seconds = self.arrived_at_us / 1e6
        kept = take(self, np.flatnonzero((seconds >= from_s) & (seconds < to_s)))
        return replace(kept, arrived_at_us=kept.arrived_at_us - round(from_s * 1e6)) if rebase else kept

    def scale_rate(self, factor: float) -> Workload:
        """The same requests `factor` times as fast: every time is divided by it, think times included."""
        if factor <= 0:
            raise ValueError("factor must be positive")
        return replace(self, arrived_at_us=np.rint(self.arrived_at_us / factor).astype(np.int64))


def take(workload: Workload, index: npt.NDArray[np.intp]) -> Workload:
    """The requests at `index` (rising positions), with their chains. Cost: O(requests + blocks taken)."""
    lengths = np.diff(workload.offsets)[index]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    where = np.repeat(workload.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
    ids = workload.request_ids
    chosen = index.tolist()
    names: Any = (lambda k: ids(chosen[k])) if callable(ids) else tuple(ids[k] for k in chosen)
    return replace(
        workload,
        arrived_at_us=workload.arrived_at_us[index],
        tenant=workload.tenant[index],
        prompt_tokens=workload.prompt_tokens[index],
        output_tokens=workload.output_tokens[index],
        offsets=offsets,
        hashes=workload.hashes[where],
        session=workload.session[index],
        category=None if workload.category is None else workload.category[index],
        turn=None if workload.turn is None else workload.turn[index],
        request_ids=names,
    )


def concat(workloads: Sequence[Workload]) -> Workload:
    """All requests of several workloads in one, by time of arrival (ties in the order given); names are merged.

    Raises `ValueError` where block sizes or models differ, or none is given. Cost: O(n log n).
    """
    if not workloads or len({(w.block_size, w.model) for w in workloads}) != 1:
        raise ValueError("concat needs workloads of one block size and one model")
    arrived = np.concatenate([w.arrived_at_us for w in workloads])
    order = np.argsort(arrived, kind="stable")
    starts = np.cumsum([0] + [len(w.hashes) for w in workloads])
    offsets = np.concatenate([w.offsets[:-1] + s for w, s in zip(workloads, starts[:-1], strict=True)])
    lengths = np.concatenate([np.diff(w.offsets) for w in workloads])[order]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    where = np.repeat(offsets[order] - new_offsets[:-1], lengths) + np.arange(new_offsets[-1])
    tenant, tenants = _merge([(w.tenant, w.tenants) for w in workloads])
    session, sessions = _merge([(w.session, w.sessions) for w in workloads])
    category, categories = _merge([(_column(w.category), w.categories) for w in workloads])
    names = [w.request_id(k) for w in workloads for k in range(len(w))]
    return Workload(
        arrived_at_us=arrived[order],
        tenant=tenant[order],
        tenants=tenants,
        prompt_tokens=np.concatenate([w.prompt_tokens for w in workloads])[order],
        output_tokens=np.concatenate([w.output_tokens for w in workloads])[order],
        block_size=workloads[0].block_size,
        offsets=new_offsets,
        hashes=np.concatenate([w.hashes for w in workloads])[where],
        session=session[order],
        sessions=sessions,
        category=category[order],
        categories=categories,
        turn=np.concatenate([_column(w.turn) for w in workloads])[order],
        model=workloads[0].model,
        request_ids=tuple(names[k] for k in order.tolist()),
        origin="+".join(dict.fromkeys(w.origin for w in workloads)),
    )


def _column(codes: Codes | None) -> Codes:
    assert codes is not None  # __post_init__ filled it
    return codes


def _merge(columns: Sequence[tuple[Codes, tuple[str, ...]]]) -> tuple[Codes, tuple[str, ...]]:
    names: dict[str, int] = {}
    codes = []
    for column, vocabulary in columns:
        table = np.array([names.setdefault(name, len(names)) for name in vocabulary] + [-1], dtype=np.int32)
        codes.append(table[column])  # code -1 reads the last entry, which is -1
    return np.concatenate(codes), tuple(names)


@njit(cache=True, nogil=True)
def mix(x):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    x = np.uint64(x) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@njit(cache=True, nogil=True)
def _dense_ids(hashes, owner):  # type: ignore[no-untyped-def]
    ids = np.empty(hashes.size, np.int32)
    first = np.empty(1024, np.int64)
    table = np.full(4096, -1, np.int32)
    distinct = 0
    for k in range(hashes.size):
        mask = np.uint64(table.size - 1)
        slot = mix(hashes[k] ^ (np.uint64(owner[k]) << np.uint64(48))) & mask
        while table[slot] >= 0:
            f = first[table[slot]]
            if hashes[f] == hashes[k] and owner[f] == owner[k]:
                break
            slot = (slot + np.uint64(1)) & mask
        if table[slot] < 0:
            if distinct == first.size:
                first = np.concatenate((first, np.empty(first.size, np.int64)))
            first[distinct] = k
            table[slot] = distinct
            distinct += 1
            if 2 * distinct > table.size:
                table = _rehash(hashes, owner, first[:distinct], 2 * table.size)
            ids[k] = distinct - 1
        else:
            ids[k] = table[slot]
    return ids, first[:distinct].copy()


@njit(cache=True, nogil=True)
def _rehash(hashes, owner, first, size):  # type: ignore[no-untyped-def]
    table = np.full(size, -1, np.int32)
    mask = np.uint64(size - 1)
    for d in range(first.size):
        f = first[d]
        slot = mix(hashes[f] ^ (np.uint64(owner[f]) << np.uint64(48))) & mask
        while table[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        table[slot] = d
    return table
