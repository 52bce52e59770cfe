"""Mixes of session classes: types of request whose turns come back after exponential times of their own. Everything here is synthetic.

A class says how its prompts begin (shared heads of uneven popularity), how they grow, how likely a session goes on and after how long. A
block's hash commits to its head, its session and all before it, so prompts share exactly a head, or an earlier turn of the same session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.special import ndtri

from analytics.fleet.workload import Workload, mix

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
# Sessions that began so many spans before the load run on into it; their earlier turns are cut.
_LEAD_SPANS = 0.5
_MAX_TURNS = 256


@dataclass(frozen=True)
class SessionClass:
    """One type of request.

    `share` is its part of all sessions of its tenant. Prompts begin with one of `heads` heads, head k with probability proportional to
    1/k^`head_zipf`, its length lognormal (median `head_tokens`, sigma of the logarithm `head_sigma`; 0 tokens for none). Turn 1 adds
    lognormal `first_tokens`, later turns the last output and `later_tokens`. After turn 1 a session goes on with probability `goes_on[0]`,
    after later ones with `goes_on[1]`, after an exponential time whose mean is `think_s[turn - 1]` (the last one repeats), or with
    probability `slow_ratio` `slow_s`.
    """

    category: str
    share: float
    heads: int = 1
    head_zipf: float = 1.0
    head_tokens: float = 0.0
    head_sigma: float = 0.0
    first_tokens: float = 300.0
    later_tokens: float = 150.0
    sigma: float = 0.8
    output_tokens: float = 250.0
    goes_on: tuple[float, float] = (0.0, 0.0)
    think_s: tuple[float, ...] = (60.0,)
    slow_ratio: float = 0.0
    slow_s: float = 1800.0

    @property
    def mean_turns(self) -> float:
        """Expected turns of a session."""
        return 1.0 + self.goes_on[0] / (1.0 - self.goes_on[1])


@dataclass(frozen=True)
class ClientSpec:
    """One tenant: its part of all sessions, its classes, and the coefficient of variation of the gaps between its session starts."""

    name: str
    share: float
    classes: Sequence[SessionClass] = field(default_factory=tuple)
    gap_cv: float = 1.0


def mix_sessions(
    clients: Sequence[ClientSpec],
    *,
    minutes: float,
    requests_per_s: float,
    block_size: int = 16,
    seed: int = 0,
    max_prompt_tokens: int = 32_768,
    model: str = "synthetic-model",
) -> Workload:
    """Requests of all clients' sessions by arrival; `category`, `turn` and `session` are filled in, heads are each client's own.

    Gaps between a client's session starts are gamma, of its `gap_cv` (1: a Poisson process). The rate is steady from the start. A session
    ends before its prompt would pass `max_prompt_tokens`. Deterministic for a seed. Raises `ValueError` for shares that add up to nothing.
    Cost: O(blocks).
    """
    total = sum(client.share for client in clients)
    if not total > 0 or any(sum(c.share for c in client.classes) <= 0 for client in clients):
        raise ValueError("clients and their classes need shares above 0")
    rng = np.random.default_rng(seed)
    turns = sum(client.share / total * _mean_turns(client) for client in clients)
    parts = [
        _client_requests(client, requests_per_s / turns * client.share / total, minutes * 60.0, block_size, max_prompt_tokens, stream)
        for client, stream in zip(clients, rng.spawn(len(clients)), strict=True)
    ]
    column = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    tenant = np.repeat(np.arange(len(clients)), [part["at_s"].size for part in parts])
    order = np.argsort(column["at_s"], kind="stable")
    column, tenant = {name: values[order] for name, values in column.items()}, tenant[order]
    names = list(dict.fromkeys(c.category for client in clients for c in client.classes))
    code = [np.array([names.index(c.category) for c in client.classes], np.int32) for client in clients]
    start = np.concatenate([[0], np.cumsum([len(c) for c in code])])
    _, first, session = np.unique(tenant << 40 | column["session"], return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first)).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(column["prompt_tokens"] // block_size)]).astype(np.int64)
    return Workload(
        arrived_at_us=np.rint(column["at_s"] * 1e6).astype(np.int64),
        tenant=tenant.astype(np.int32),
        tenants=tuple(client.name for client in clients),
        prompt_tokens=column["prompt_tokens"],
        output_tokens=column["output_tokens"],
        block_size=block_size,
        offsets=offsets,
        hashes=_hash_chains(offsets, tenant, column["head"], column["head_blocks"], column["session"], np.uint64(seed)),
        session=rank[session.reshape(-1)],
        sessions=tuple(f"s{k}" for k in range(first.size)),
        category=np.concatenate(code)[start[tenant] + column["kind"]],
        categories=tuple(names),
        turn=column["turn"].astype(np.int32),
        model=model,
        origin="synthetic",
    )


def _mean_turns(client: ClientSpec) -> float:
    shares = np.array([c.share for c in client.classes])
    return float(shares @ [c.mean_turns for c in client.classes] / shares.sum())


def _client_requests(
    client: ClientSpec, sessions_per_s: float, span_s: float, block_size: int, max_prompt_tokens: int, rng: np.random.Generator
) -> dict[str, npt.NDArray[Any]]:
    """Requests of one client within the span; a row a turn."""
    lead_s = _LEAD_SPANS * span_s
    starts = _starts(sessions_per_s, lead_s + span_s, client.gap_cv, rng) - lead_s
    shares = np.array([c.share for c in client.classes])
    kind = rng.choice(shares.size, starts.size, p=shares / shares.sum())

    def of(name: str) -> F64:
        return np.array([getattr(c, name) for c in client.classes], np.float64)

    turns = _turn_counts(client.classes, kind, rng)
    session = np.repeat(np.arange(starts.size), turns)
    begin = np.cumsum(turns) - turns
    turn = np.arange(session.size) - begin[session]
    which = kind[session]
    head, head_tokens = _heads(client.classes, kind, rng)
    noise = np.exp(of("sigma")[which] * rng.standard_normal((2, session.size)))
    user = np.where(turn == 0, of("first_tokens")[which], of("later_tokens")[which]) * noise[0]
    output = of("output_tokens")[which] * noise[1]
    user, output = (np.maximum(np.rint(values), 1).astype(np.int64) for values in (user, output))
    grown = np.cumsum(user + output)
    prompt = head_tokens[session] + grown - (grown[begin] - (user + output)[begin])[session] - output
    at_s = starts[session] + _since_start(client.classes, which, turn, begin, session, rng)
    kept = (at_s >= 0) & (at_s < span_s) & (prompt <= max_prompt_tokens)
    rows = {
        "at_s": at_s,
        "session": session,
        "kind": which,
        "turn": turn + 1,
        "head": head[session],
        "head_blocks": head_tokens[session] // block_size,
        "prompt_tokens": prompt,
        "output_tokens": output,
    }
    return {name: values[kept] for name, values in rows.items()}


def _starts(rate: float, span_s: float, cv: float, rng: np.random.Generator) -> F64:
    """Moments from 0 on with gamma gaps of mean 1/rate and the given coefficient of variation; a process that has long been running."""
    shape = 1.0 / (cv * cv)
    count = int(rate * span_s + 10 * cv * np.sqrt(rate * span_s + 1) + 10)
    at = np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), count + count // 10))
    at -= at[count // 10]
    return at[(at >= 0) & (at < span_s)]


def _turn_counts(classes: Sequence[SessionClass], kind: I64, rng: np.random.Generator) -> I64:
    first, later = (np.array([c.goes_on[k] for c in classes])[kind] for k in (0, 1))
    stop = np.maximum(1.0 - later, 1e-9)
    more = np.where(stop >= 1, 1, 1 + np.floor(np.log1p(-rng.random(kind.size)) / np.log(np.where(later > 0, later, 0.5))))
    return np.minimum(np.where(rng.random(kind.size) < first, 1 + more, 1), _MAX_TURNS).astype(np.int64)


def _heads(classes: Sequence[SessionClass], kind: I64, rng: np.random.Generator) -> tuple[I64, I64]:
    """Head of each session, numbered over all classes, and its tokens."""
    head, tokens = np.zeros(kind.size, np.int64), np.zeros(kind.size, np.int64)
    base = 0
    for code, c in enumerate(classes):
        mine = np.flatnonzero(kind == code)
        weights = 1.0 / np.arange(1, c.heads + 1) ** c.head_zipf
        drawn = np.minimum(np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(mine.size)), c.heads - 1)
        # Spread by the golden ratio, not drawn: the few popular heads decide the hit ratio, so their lengths must not hang on the seed.
        spread = ndtri((0.5 + np.arange(c.heads) * 0.6180339887498949) % 1.0)
        lengths = np.rint(c.head_tokens * np.exp(c.head_sigma * spread)).astype(np.int64)
        head[mine], tokens[mine] = base + drawn, lengths[drawn]
        base += c.heads
    return head, tokens


def _since_start(classes: Sequence[SessionClass], which: I64, turn: I64, begin: I64, session: I64, rng: np.random.Generator) -> F64:
    """Seconds from the session's start to each turn."""
    longest = max(len(c.think_s) for c in classes)
    means = np.array([[*c.think_s, *[c.think_s[-1]] * (longest - len(c.think_s))] for c in classes])
    slow = rng.random(which.size) < np.array([c.slow_ratio for c in classes])[which]
    mean = np.where(slow, np.array([c.slow_s for c in classes])[which], means[which, np.clip(turn - 1, 0, longest - 1)])
    gap = np.where(turn == 0, 0.0, mean * rng.exponential(1.0, which.size))
    at = np.cumsum(gap)
    return at - at[begin][session]


@njit(cache=True, nogil=True)
def _hash_chains(offsets, tenant, head, head_blocks, session, seed):  # type: ignore[no-untyped-def]
    hashes = np.empty(offsets[-1], np.uint64)
    for k in range(tenant.size):
        h = mix(mix(mix(seed) ^ np.uint64(tenant[k])) ^ np.uint64(head[k]))
        own = mix(np.uint64(session[k]) ^ mix(np.uint64(tenant[k]) + np.uint64(0x5E55)))
        for b in range(offsets[k + 1] - offsets[k]):
            h = mix(h) if b < head_blocks[k] else mix(h ^ own)
            hashes[offsets[k] + b] = h
    return hashes
