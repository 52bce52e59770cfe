"""What an infinite cache serves, who gives and who gets it, and how much capacity comes near to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.workload.labels import LabelledChains, Links, Touches, group_counts, group_hits, leading_blocks, links, prefix_tokens
from analytics.workload.measures import fewest_share, ratio, top_share

I64 = npt.NDArray[np.int64]

IDEAL_PARTS = (0.90, 0.95, 0.99)
CAPACITY_SHARES = (0.01, 0.05, 0.10, 0.25, 0.50)
SKEW_SHARES = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
CURVE_POINTS = 24


def ideal(trace: LabelledChains, cost: tuple[float, float]) -> dict[str, Any]:
    """Hit ratio of an infinite cache, tenants apart: by blocks, by prompt tokens and by prefill cost.

    `cost` is (a s/token, b s/token^2): the cost of tokens [s, e) is a*(e-s) + b*(e^2-s^2)/2. Input only.
    """
    blocks, prompts = trace.hit_blocks, trace.chains.prompt_tokens
    tokens = prefix_tokens(trace.chains, blocks)
    a, b = cost
    saved, whole = (float((a * x + b * x.astype(np.float64) ** 2 / 2).sum()) for x in (tokens, prompts))
    return {
        "hit_blocks_ratio": ratio(int(blocks.sum()), trace.chains.blocks),
        "hit_tokens_ratio": ratio(int(tokens.sum()), int(prompts.sum())),
        "hit_prefill_cost_ratio": ratio(saved, whole),
    }


def one_touch(counts: npt.NDArray[np.int32], blocks: int) -> dict[str, Any]:
    """Blocks that one request alone touched, as a share of the distinct blocks and of all references; and the most wanted block's share.

    `counts` int32[distinct], requests that touched each block; `blocks` references. Source: the one-hit wonders of CacheLib (OSDI'20).
    """
    once = int((counts == 1).sum())
    return {
        "distinct_ratio": ratio(once, counts.size),
        "references_ratio": ratio(once, blocks),
        "top_block_references_ratio": ratio(int(counts.max(initial=0)), blocks),
    }


def skew(trace: LabelledChains, touched: Touches) -> dict[str, Any]:
    """How unevenly reuse falls: on blocks, on the requests that get it, on those that made the blocks (touched them first), on sessions.

    Source: KVCache in the Wild (ATC'25): 10 % of the blocks give 77 % of the reuses.
    """
    reuses = touched.requests - 1
    given = np.bincount(touched.first, reuses, minlength=trace.chains.requests)
    found: dict[str, Any] = {f"reuses_of_top_{name}_blocks_ratio": top_share(reuses, s) for name, s in (("1pct", 0.01), ("10pct", 0.1))}
    found["by_top_blocks"] = [
        {"label": f"top {100 * share:g} %", "blocks_ratio": share, "reuses_ratio": top_share(reuses, share)} for share in SKEW_SHARES
    ]
    found["requests_getting_90pct_ratio"] = fewest_share(trace.hit_blocks, 0.9)
    found["requests_giving_90pct_ratio"] = fewest_share(given, 0.9)
    named = trace.session >= 0
    if named.any():
        found["sessions_getting_90pct_ratio"] = fewest_share(np.bincount(trace.session[named], trace.hit_blocks[named]), 0.9)
    return found


def tenant_sharing(trace: LabelledChains) -> dict[str, Any]:
    """What tenants would serve each other if they shared blocks: today (tenant, hash) is the key, so this is what isolation costs.

    `cross_tenant_hits_ratio` is the part of the shared cache's hits that no block of the request's own tenant could serve.
    """
    ids, distinct = trace.dense
    shared = leading_blocks(links(ids, trace.chains.offsets, distinct), trace.chains.requests)
    own, all_ = int(trace.hit_blocks.sum()), int(shared.sum())
    tokens = prefix_tokens(trace.chains, shared)
    owners = group_counts(ids, trace.chains.offsets, distinct, trace.tenant)
    return {
        "assigned": trace.tenants_assigned,
        "tenants": len(trace.tenants),
        "shared_hit_blocks_ratio": ratio(all_, trace.chains.blocks),
        "shared_hit_tokens_ratio": ratio(int(tokens.sum()), int(trace.chains.prompt_tokens.sum())),
        "within_tenant_hits_ratio": ratio(own, all_),
        "cross_tenant_hits_ratio": ratio(all_ - own, all_),
        "blocks_of_several_tenants_ratio": ratio(int((owners > 1).sum()), distinct),
    }


def session_sharing(trace: LabelledChains) -> dict[str, Any]:
    """Part of the hits that the request's own session could have served alone, its conversation (sub-agents included), or only another.

    Hits are leading runs, so the own session's part is the leading run that it has asked for before itself.
    """
    ids, distinct = trace.private
    total = int(trace.hit_blocks.sum())
    session, conversation = (
        int(group_hits(ids, trace.chains.offsets, distinct, group).sum()) for group in (trace.session, trace.conversation)
    )
    return {
        "within_session_hits_ratio": ratio(session, total),
        "within_conversation_hits_ratio": ratio(conversation, total),
        "cross_conversation_hits_ratio": None if trace.local_ids else ratio(total - conversation, total),
    }


def capacity(curve: Curve, distinct: int) -> dict[str, Any]:
    """Blocks that an LRU (leaf first) needs for 90, 95 and 99 % of the ideal hits, and its hit ratio at shares of the distinct blocks.

    `curve` inside is for drawing: 24 capacities from a thousandth of the distinct blocks to all of them, evenly in logarithm.
    """
    found: dict[str, Any] = {"distinct_blocks": distinct}
    for part in IDEAL_PARTS:
        need = _needed(curve, part)
        found[f"for_{part * 100:.0f}pct_of_ideal_blocks"] = need
        found[f"for_{part * 100:.0f}pct_of_ideal_distinct_ratio"] = None if need is None else need / distinct
    sizes = [max(round(share * distinct), 1) for share in CAPACITY_SHARES]
    for share, hit in zip(CAPACITY_SHARES, curve.hit_ratio(sizes).tolist(), strict=True):
        found[f"hit_blocks_at_{share * 100:.0f}pct_of_distinct_ratio"] = hit
    sizes = np.unique(np.geomspace(max(distinct / 1000, 1), max(distinct, 1), CURVE_POINTS).round().astype(np.int64)).tolist()
    columns = zip(sizes, curve.hit_ratio(sizes).tolist(), curve.hit_ratio(sizes, "tokens").tolist(), strict=True)
    found["curve"] = [
        {"label": f"{size} blocks", "capacity_blocks": size, "hit_blocks_ratio": blocks, "hit_tokens_ratio": tokens}
        for size, blocks, tokens in columns
    ]
    return found


def _needed(curve: Curve, part: float) -> int | None:
    if not curve.blocks.size:
        return None
    at = int(np.searchsorted(curve.blocks, part * curve.blocks[-1] * (1 - 1e-12), side="left"))
    return int(curve.distances[at]) + 1


def link_tokens(trace: LabelledChains, found: Links) -> I64:
    """Tokens of every stretch of `found`, int64[rows]; links must be of `trace`."""
    chains = trace.chains
    if chains.block_tokens is not None:
        ends = np.concatenate([[0], np.cumsum(chains.block_tokens, dtype=np.int64)])
        start = chains.offsets[found.request] + found.position
        return ends[start + found.length] - ends[start]
    end = found.position.astype(np.int64) + found.length
    tail = np.where(end == trace.lengths[found.request], _missing_tail(trace)[found.request], 0)
    return found.length.astype(np.int64) * chains.block_size - tail


def _missing_tail(trace: LabelledChains) -> I64:
    """Tokens that the last block of each request is short of a full one."""
    lengths = trace.lengths
    return np.where(lengths > 0, lengths * trace.chains.block_size - prefix_tokens(trace.chains, lengths), 0)
