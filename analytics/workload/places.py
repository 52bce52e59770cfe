"""Where in a prompt reuse lies: by position, in shared heads (templates), and at positions that a prefix cache cannot serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.workload.hits import link_tokens
from analytics.workload.labels import LabelledChains, group_counts, prefix_tokens
from analytics.workload.measures import ratio

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_TEMPLATES = 10
TEMPLATE_SHARE = 0.01


def positions(trace: LabelledChains) -> list[dict[str, Any]]:
    """References and hits by position in the chain: one row for 0, 1, 2-3, 4-7, ... blocks before it."""
    longest = int(trace.lengths.max(initial=0))
    edges = np.array([0, *(1 << k for k in range(max(longest, 1).bit_length() + 1))], np.int64)
    asked = np.cumsum(np.bincount(trace.lengths, minlength=longest + 1)[::-1])[::-1]  # requests of at least so many blocks
    served = np.cumsum(np.bincount(trace.hit_blocks, minlength=longest + 1)[::-1])[::-1]
    references, hits = (np.concatenate([[0], np.cumsum(counts[1:])]) for counts in (asked, served))
    total, rows = int(hits[-1]), []
    for lo, hi in zip(edges, edges[1:], strict=False):
        if lo >= longest:
            break
        span = slice(min(lo, longest), min(hi, longest))
        blocks, hit = int(references[span.stop] - references[span.start]), int(hits[span.stop] - hits[span.start])
        rows.append(
            {
                "label": str(lo) if hi == lo + 1 else f"{lo}-{hi - 1}",
                "from_position": int(lo),
                "references": blocks,
                "hit_blocks_ratio": ratio(hit, blocks),
                "share_of_hits_ratio": ratio(hit, total),
            }
        )
    return rows


def templates(trace: LabelledChains) -> dict[str, Any]:
    """Shared heads: the longest prefixes that at least 1 % of the conversations (of the requests, where none are named) have in common.

    A head ends at a block that so many have asked for, none of whose successors is asked for by as many. `heads` lists the ten with most
    requests. Cost: three passes over the references.
    """
    ids, distinct = trace.private
    offsets, requests = trace.chains.offsets, trace.chains.requests
    counted = "conversations" if (trace.conversation >= 0).any() else "requests"
    group = trace.conversation if counted == "conversations" else np.arange(requests, dtype=np.int32)
    groups = int(np.unique(group[group >= 0]).size)
    least = max(int(np.ceil(TEMPLATE_SHARE * groups)), 2)
    counts = group_counts(ids, offsets, distinct, group)
    depth, ends = _heads(ids, offsets, counts >= least)
    blocks = np.flatnonzero(ends >= 0)
    touched = group_counts(ids, offsets, distinct, np.arange(requests, dtype=np.int32))
    length = np.zeros(requests, np.int64)
    heads: list[dict[str, Any]] = []
    for block in sorted(blocks.tolist(), key=lambda b: (-touched[b], b))[:MAX_TEMPLATES]:
        request, position = divmod(int(ends[block]), 1 << 32)
        length[request] = position + 1
        tokens = int(prefix_tokens(trace.chains, length)[request])
        length[request] = 0
        heads.append(
            {
                "label": f"head {len(heads) + 1}",
                "length_blocks": position + 1,
                "length_tokens": tokens,
                "requests_ratio": ratio(int(touched[block]), requests),
                f"{counted}_ratio": ratio(int(counts[block]), groups),
            }
        )
    within = np.minimum(depth, trace.hit_blocks)
    return {
        "counted": counted,
        "least": least,
        "found": int(blocks.size),
        "requests_ratio": ratio(int((depth > 0).sum()), requests),
        "share_of_hits_ratio": ratio(int(within.sum()), int(trace.hit_blocks.sum())),
        "heads": heads,
    }


def any_position(trace: LabelledChains) -> dict[str, Any]:
    """Content seen before at any position of any earlier request of the tenant, beside what a prefix cache can serve.

    Raises `ValueError` where the trace does not name contents.
    """
    if trace.content is None:
        raise ValueError("the trace does not name what stands in a block whatever stands before it")
    loose = replace(trace, chains=replace(trace.chains, hashes=trace.content), content=None)
    used = loose.links.reused
    prefix = trace.hit_blocks
    prompt_tokens = int(trace.chains.prompt_tokens.sum())
    return {
        "prefix_blocks_ratio": ratio(int(prefix.sum()), trace.chains.blocks),
        "prefix_tokens_ratio": ratio(int(prefix_tokens(trace.chains, prefix).sum()), prompt_tokens),
        "any_position_blocks_ratio": ratio(int(used.length.sum()), trace.chains.blocks),
        "any_position_tokens_ratio": ratio(int(link_tokens(loose, used).sum()), prompt_tokens),
    }


@nb.njit(cache=True, nogil=True)
def _heads(ids: I32, offsets: I64, heavy: Flags) -> tuple[I64, I64]:
    """Leading heavy blocks of each request; for each heavy block without heavy successor its first place: request << 32 | position."""
    depth, ends = np.zeros(offsets.size - 1, np.int64), np.full(heavy.size, -2, np.int64)
    for request in range(offsets.size - 1):
        lo, at = offsets[request], offsets[request]
        while at < offsets[request + 1] and heavy[ids[at]]:
            at += 1
        depth[request] = at - lo
        for i in range(lo, at - 1):
            ends[ids[i]] = -1
        if at > lo and ends[ids[at - 1]] == -2:
            ends[ids[at - 1]] = request << 32 | (at - 1 - lo)
    return depth, ends
