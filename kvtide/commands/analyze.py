"""`kvtide analyze`: what a trace holds, and what an infinite prefix cache could serve of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
from rich.text import Text

from analytics.reuse.run_exact import RunStack
from ingest.sources import TraceRequest
from kvtide.tracefiles import TraceInput, clock_note, plain_console, plain_table, trace_options

# Blocks held before they are handed to the stacks: few calls, and never much memory.
_BATCH_BLOCKS = 1 << 20


@dataclass
class TenantProfile:
    """Load and infinite-cache reuse of one tenant; memory is one u64 hash a distinct block, at most four times over."""

    tenant: str
    assigned: bool
    requests: int = 0
    blocks: int = 0
    prompt_tokens: int = 0
    hit_blocks: int = 0
    hit_tokens: int = 0
    stack: RunStack = field(default_factory=RunStack)
    pending: list[TraceRequest] = field(default_factory=list)

    def flush(self) -> None:
        """Look up what is pending; a request's hit is the leading run of its chain that has been seen before."""
        requests, self.pending = self.pending, []
        offsets = np.zeros(len(requests) + 1, np.int64)
        np.cumsum([request.chain.size for request in requests], out=offsets[1:])
        hashes = np.concatenate([request.chain for request in requests])
        runs = self.stack.touch(np.zeros(len(requests), np.int64), offsets, hashes)
        served = np.bincount(runs.request, runs.length * (runs.distance >= 0), minlength=len(requests)).astype(np.int64)
        self.requests += len(requests)
        self.blocks += int(offsets[-1])
        self.hit_blocks += int(served.sum())
        for request, blocks in zip(requests, served.tolist(), strict=True):
            self.prompt_tokens += request.prompt_tokens
            self.hit_tokens += leading_tokens(request, blocks)

    def row(self, has_blocks: bool) -> dict[str, Any]:
        """The tenant's line of the result."""
        return {
            "tenant": self.tenant,
            "assigned": self.assigned,
            "requests": self.requests,
            "blocks": self.blocks,
            "distinct_blocks": self.stack.depth_blocks,
            "prompt_tokens": self.prompt_tokens,
            "ideal_hit_ratio": ideal(self.hit_blocks, self.blocks, self.hit_tokens, self.prompt_tokens) if has_blocks else None,
        }


class TraceProfile:
    """Totals of a trace, and each tenant's profile. Tenants share no block: the same hash under two tenants is two blocks."""

    def __init__(self) -> None:
        self.tenants: dict[str, TenantProfile] = {}
        self._block_sizes: set[int] = set()
        self._first_s, self._last_s = np.inf, -np.inf
        self._output_tokens = self._outputs = 0
        self._reported_hit = self._reported_prompt = 0
        self._held_blocks = 0

    def add(self, request: TraceRequest) -> None:
        """Count one request; requests must come in the order in which they were served, or session by session."""
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            tenant = self.tenants[request.tenant] = TenantProfile(request.tenant, request.tenant_assigned)
        tenant.pending.append(request)
        self._block_sizes.add(request.block_size if request.block_tokens is None else 0)
        self._first_s, self._last_s = min(self._first_s, request.arrived_at_s), max(self._last_s, request.arrived_at_s)
        if request.output_tokens is not None:
            self._output_tokens += request.output_tokens
            self._outputs += 1
        if request.hit_tokens is not None:
            self._reported_hit += request.hit_tokens
            self._reported_prompt += request.prompt_tokens
        self._held_blocks += 64 + request.chain.size
        if self._held_blocks >= _BATCH_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Hand everything held to the tenants' stacks."""
        self._held_blocks = 0
        for tenant in self.tenants.values():
            if tenant.pending:
                tenant.flush()

    def result(self, has_blocks: bool) -> dict[str, Any]:
        """The JSON document, but for what only the input knows."""
        self.flush()
        rows = [self.tenants[name] for name in sorted(self.tenants)]
        requests, blocks, prompt_tokens = (sum(getattr(row, name) for row in rows) for name in ("requests", "blocks", "prompt_tokens"))
        hit_blocks, hit_tokens = sum(row.hit_blocks for row in rows), sum(row.hit_tokens for row in rows)
        return {
            "requests": requests,
            "blocks": blocks,
            "distinct_blocks": sum(row.stack.depth_blocks for row in rows),
            "block_size": max(self._block_sizes) or None if has_blocks and len(self._block_sizes) == 1 else None,
            "ideal_hit_ratio": ideal(hit_blocks, blocks, hit_tokens, prompt_tokens) if has_blocks else None,
            "reported_hit_ratio": ratio(self._reported_hit, self._reported_prompt),
            "prompt_tokens": prompt_tokens,
            "output_tokens": self._output_tokens if self._outputs else None,
            "mean_prompt_tokens": ratio(prompt_tokens, requests),
            "mean_output_tokens": ratio(self._output_tokens, self._outputs),
            "span_s": self._last_s - self._first_s if requests else None,
            "tenants": [row.row(has_blocks) for row in rows],
        }


def leading_tokens(request: TraceRequest, blocks: int) -> int:
    """Tokens in the first `blocks` blocks of a request's chain."""
    if request.block_tokens is not None:
        return int(request.block_tokens[:blocks].sum())
    return min(blocks * request.block_size, request.prompt_tokens)


def ideal(hit_blocks: int, blocks: int, hit_tokens: int, prompt_tokens: int) -> dict[str, float | None]:
    """Hit ratio of an infinite cache that serves leading runs; input blocks only."""
    return {"blocks": ratio(hit_blocks, blocks), "tokens": ratio(hit_tokens, prompt_tokens)}


def ratio(part: int, whole: int) -> float | None:
    """part / whole, None where there is no whole."""
    return part / whole if whole else None


@click.command()
@trace_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(as_json: bool, **options: Any) -> None:
    """Say what a trace holds: load, blocks, and the ideal hit ratio.

    The ideal hit ratio is that of an infinite cache serving the leading run of each prompt that was seen before, tenant by tenant, from
    input blocks only: an engine that also reuses decoded blocks can exceed it.
    """
    trace = TraceInput(**options)
    profile = TraceProfile()
    for request in trace.requests("session"):
        profile.add(request)
    head = {"trace": trace.name, "format": trace.source.name, "clock": trace.source.clock}
    result = {**head, **profile.result(trace.source.has_blocks), "bad_records": trace.bad_records}
    if as_json:
        click.echo(json.dumps(result))
    else:
        _print(result, clock_note(trace.source))
    trace.finish()


def _print(result: dict[str, Any], note: str | None) -> None:
    console = plain_console()
    for name, value in result.items():
        if name == "ideal_hit_ratio" and value:
            value = f"blocks {_shown(value['blocks'])}  tokens {_shown(value['tokens'])}  (infinite cache, input blocks only)"
        if name != "tenants" and value is not None:
            console.print(f"{name:<20}{_shown(value)}", markup=False)
    if note:
        console.print(f"note: {note}", markup=False)
    table = plain_table("tenant", "requests", "blocks", "distinct_blocks", "prompt_tokens", "ideal_blocks", "ideal_tokens")
    for row in result["tenants"]:
        name = f"{row['tenant']} (assigned)" if row["assigned"] else row["tenant"]
        best = row["ideal_hit_ratio"] or {"blocks": None, "tokens": None}
        counts = (row[key] for key in ("requests", "blocks", "distinct_blocks", "prompt_tokens"))
        table.add_row(Text(name), *(_shown(value) for value in (*counts, best["blocks"], best["tokens"])))
    console.print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
