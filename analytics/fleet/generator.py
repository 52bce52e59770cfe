"""Synthetic multi-tenant load, and the two ways in which load alone breaks a cache. Everything here is labelled synthetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numba import njit

from analytics.fleet.presets import burst_load, category_mix, client_mix, qwen_like
from analytics.fleet.workload import Codes, Hashes, Ints, Workload, mix

__all__ = ["TenantSpec", "burst_load", "category_mix", "change_prompt_head", "client_mix", "generate", "qwen_like", "scan"]

Arrivals = Literal["poisson", "paced"]
_PILOT = 4096


@dataclass(frozen=True)
class TenantSpec:
    """One tenant's habits.

    `share` is its part of all requests. A session takes one of `heads` prompt heads of `head_blocks` blocks and a geometric number of
    turns (mean `turns`); between turns it thinks an exponential time (mean `think_s`; with a `think_shape` other than 1 a gamma time of
    that shape, the larger the more regular, as tool loops are). Each turn adds a lognormal number of user
    tokens to the prompt, and the previous turn's output (lognormal too, median and sigma of the logarithm). A session ends before its
    prompt would pass `max_prompt_tokens`.
    """

    name: str
    share: float
    heads: int = 1
    head_blocks: int = 8
    turns: float = 5.0
    think_s: float = 45.0
    think_shape: float = 1.0
    user_tokens: float = 120.0
    user_sigma: float = 0.5
    output_tokens: float = 200.0
    output_sigma: float = 0.5
    max_prompt_tokens: int = 8192


@dataclass(frozen=True)
class _Sessions:
    """One tenant's sessions, turn by turn: which session, seconds since its first turn, prompt and output tokens."""

    session: Ints
    turn: Ints
    since_s: npt.NDArray[np.float64]
    prompt_tokens: Ints
    output_tokens: Ints


def generate(
    tenants: Sequence[TenantSpec],
    *,
    minutes: float,
    requests_per_s: float,
    block_size: int = 64,
    seed: int = 0,
    model: str = "synthetic-model",
    arrivals: Arrivals = "poisson",
) -> Workload:
    """Sessions of several tenants whose prompts grow turn by turn, at a rate that is steady from the first minute on.

    Sessions begun before time 0 run on into the load (their earlier turns are cut), so there is no ramp. With `arrivals="paced"` session
    `k` begins at a random moment of its own slot of 1/rate seconds and the turn counts are stratified: the same distributions with
    the noise of the counts taken out, so that requests and tokens per minute stay flat. Deterministic for a seed. Cost: O(blocks).
    """
    rng = np.random.default_rng(seed)
    share = sum(spec.share for spec in tenants)
    parts = [
        _tenant_requests(spec, requests_per_s * spec.share / share, minutes * 60.0, block_size, rng.spawn(1)[0], arrivals)
        for spec in tenants
    ]
    lengths = [len(part["at_s"]) for part in parts]
    order = np.argsort(np.concatenate([part["at_s"] for part in parts]), kind="stable")
    column = {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}
    tenant = np.repeat(np.arange(len(tenants), dtype=np.int32), lengths)[order]
    session, sessions = _number_sessions(tenant, column["session"], tenants)
    prompt = column["prompt_tokens"]
    offsets = np.concatenate([[0], np.cumsum(prompt // block_size)]).astype(np.int64)
    heads = np.array([spec.head_blocks for spec in tenants], np.int64)[tenant]
    hashes = _chains(offsets, tenant, column["head"], heads, column["session"], np.uint64(seed))
    return Workload(
        arrived_at_us=np.rint(column["at_s"] * 1e6).astype(np.int64),
        tenant=tenant,
        tenants=tuple(spec.name for spec in tenants),
        prompt_tokens=prompt,
        output_tokens=column["output_tokens"],
        block_size=block_size,
        offsets=offsets,
        hashes=hashes,
        session=session,
        sessions=sessions,
        turn=column["turn"].astype(np.int32),
        model=model,
        origin="synthetic",
    )


def _number_sessions(tenant: Codes, number: Ints, tenants: Sequence[TenantSpec]) -> tuple[Codes, tuple[str, ...]]:
    """Dense codes over all tenants' sessions, in order of first appearance, and their names (tenant and number)."""
    pair = tenant.astype(np.int64) << 32 | number
    _, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first)).astype(np.int32)
    names = tuple(f"{tenants[pair[k] >> 32].name}-s{pair[k] & 0xFFFFFFFF}" for k in np.sort(first))
    return rank[inverse], names


def _tenant_requests(
    spec: TenantSpec, rate: float, span_s: float, block_size: int, rng: np.random.Generator, arrivals: Arrivals
) -> dict[str, npt.NDArray[np.float64] | Ints]:
    pilot = _sessions(spec, _PILOT, block_size, rng, arrivals)
    rate_sessions = rate * _PILOT / len(pilot.turn)
    # Ten mean session lives before time 0: what is still missing from the steady state is then a few parts in 10^5.
    before_s = 10.0 * spec.turns * spec.think_s
    count = int(np.ceil(rate_sessions * (before_s + span_s)))
    if arrivals == "poisson":
        count += int(8 * np.sqrt(count)) + 8  # so that the last session surely begins past the end
    if arrivals == "paced":
        starts = (np.arange(count) + rng.random(count)) / rate_sessions
    else:
        starts = np.cumsum(rng.exponential(1.0 / rate_sessions, count))
    drawn = _sessions(spec, count, block_size, rng, arrivals)
    at_s = starts[drawn.session] - before_s + drawn.since_s
    kept = (at_s >= 0.0) & (at_s < span_s)
    head = rng.integers(0, max(spec.heads, 1), count)[drawn.session]
    return {
        "at_s": at_s[kept],
        "session": drawn.session[kept],
        "turn": drawn.turn[kept],
        "head": head[kept],
        "prompt_tokens": drawn.prompt_tokens[kept],
        "output_tokens": drawn.output_tokens[kept],
    }


def _sessions(spec: TenantSpec, count: int, block_size: int, rng: np.random.Generator, arrivals: Arrivals) -> _Sessions:
    # Golden-ratio sequence: any stretch of consecutive sessions holds nearly the exact distribution of turn counts.
    golden = (rng.random() + np.arange(count) * 0.6180339887498949) % 1.0
    uniform = golden if arrivals == "paced" else rng.random(count)
    stop = 1.0 / max(spec.turns, 1.0)
    turns = np.ones(count, np.int64) if stop >= 1.0 else 1 + (np.log1p(-uniform) / np.log1p(-stop)).astype(np.int64)
    session = np.repeat(np.arange(count), turns)
    begin = np.concatenate([[0], np.cumsum(turns)])[:-1]
    total = len(session)
    user = np.maximum(1, np.rint(rng.lognormal(np.log(spec.user_tokens), spec.user_sigma, total))).astype(np.int64)
    output = np.maximum(1, np.rint(rng.lognormal(np.log(spec.output_tokens), spec.output_sigma, total))).astype(np.int64)
    think = rng.gamma(spec.think_shape, spec.think_s / spec.think_shape, total)
    think[begin] = 0.0
    prompt = spec.head_blocks * block_size + _since(user + output, begin, session) - output
    kept = prompt <= spec.max_prompt_tokens
    kept[begin] = True
    turn = np.arange(total) - begin[session] + 1
    since_s = _since(think, begin, session)
    return _Sessions(session[kept], turn[kept], since_s[kept], prompt[kept], output[kept])


def _since(values: npt.NDArray[Any], begin: Ints, session: Ints) -> npt.NDArray[Any]:
    """Running sum of `values` that starts anew at every session."""
    total = np.cumsum(values)
    return total - (total[begin] - values[begin])[session]


@njit(cache=True, nogil=True)
def _chains(offsets, tenant, head, head_blocks, session, seed):  # type: ignore[no-untyped-def]
    hashes = np.empty(offsets[-1], np.uint64)
    for k in range(tenant.size):
        h = mix(mix(mix(seed) ^ np.uint64(tenant[k])) ^ np.uint64(head[k]))
        key = mix(np.uint64(session[k]) ^ mix(np.uint64(tenant[k])))
        for b in range(offsets[k + 1] - offsets[k]):
            h = mix(h) if b < head_blocks[k] else mix(h ^ mix(key + np.uint64(b)))
            hashes[offsets[k] + b] = h
    return hashes


def change_prompt_head(workload: Workload, tenant: str, from_s: float) -> Workload:
    """From `from_s` on the tenant's prompts begin with something that differs in every request (a timestamp, say).

    Since a block's hash commits to everything before it, every hash from block 0 on changes. Times and lengths stay as they are.
    """
    return _salted(workload, tenant, from_s, 0x7107)


def scan(workload: Workload, tenant: str, from_s: float) -> Workload:
    """From `from_s` on every request of the tenant is a chain that nobody asks for again: a scan through the shared cache.

    Times and lengths stay as they are, so requests and tokens per minute do not move.
    """
    return _salted(workload, tenant, from_s, 0x5CA7)


def _salted(workload: Workload, tenant: str, from_s: float, salt: int) -> Workload:
    which = (workload.tenant == workload.tenants.index(tenant)) & (workload.arrived_at_us >= round(from_s * 1e6))
    hashes: Hashes = _salt(workload.hashes, workload.offsets, np.flatnonzero(which), np.uint64(salt))
    return replace(workload, hashes=hashes)


@njit(cache=True, nogil=True)
def _salt(hashes, offsets, requests, salt):  # type: ignore[no-untyped-def]
    out = hashes.copy()
    for k in requests:
        own = mix(mix(salt) ^ np.uint64(k))
        for b in range(offsets[k], offsets[k + 1]):
            out[b] = mix(out[b] ^ own)
    return out
