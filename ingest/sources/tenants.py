"""Tenants for traces that have none: drawn by Zipf's law, sticky per conversation, and marked as assigned."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ingest.chaining import mix64_int, text_hash
from ingest.errors import UsageError
from ingest.sources.base import TraceRequest

MAX_TENANTS = 10_000


def zipf_tenants(spec: str) -> Callable[[TraceRequest], str]:
    """Function from a request to its tenant, for a spec `zipf:N`: tenant i of N (`tenant-01`, …) has probability proportional to 1/i.

    The draw is a hash of the conversation: of the parent session or session, else of the chain's second block, where conversations leave
    the shared head (the only block where there is one, the request id where there is none). Equal in every run. Raises `UsageError` for
    another spec.
    """
    match = re.fullmatch(r"zipf:(\d{1,5})", spec)
    count = int(match[1]) if match else 0
    if not 1 <= count <= MAX_TENANTS:
        raise UsageError(f"--assign-tenants {spec!r} is not of the form zipf:N with N from 1 to {MAX_TENANTS}, for example zipf:8")
    weights = 1.0 / np.arange(1, count + 1)
    edges = np.cumsum(weights / weights.sum())
    width = max(2, len(str(count)))
    names = [f"tenant-{i:0{width}d}" for i in range(1, count + 1)]

    def tenant_of(request: TraceRequest) -> str:
        draw = mix64_int(_conversation(request)) / (1 << 64)
        return names[min(int(np.searchsorted(edges, draw, side="right")), count - 1)]

    return tenant_of


def _conversation(request: TraceRequest) -> int:
    session = request.parent_session or request.session
    if session is not None:
        return text_hash(session)
    if len(request.chain):
        return int(request.chain[min(1, len(request.chain) - 1)])
    return text_hash(request.request_id)
