"""One instance of an engine at the level of token blocks: what a request finds cached, and the KV events that the engine would publish.

The fleet emulator asks what a fleet does; these models ask what one engine's scheduler and cache do to requests that run side by side,
which a hit ratio depends on as much as on the policy: whether sharers of a prompt still being prefilled hit, what a repeated prompt
recomputes, what an eviction takes. docs/engines.md holds them against captured streams of the real engines.
"""

from analytics.fleet.engines.capture import (
    Phase,
    Played,
    Tally,
    captured_workload,
    first_alone,
    play,
    tally,
    together,
)
from analytics.fleet.engines.engine import Batch, Engine, KvEvent, Request, fold
from analytics.fleet.engines.rtp_llm import RtpLlmEngine
from analytics.fleet.engines.sglang import SglangEngine
from analytics.fleet.engines.vllm import VllmEngine

__all__ = [
    "Batch",
    "Engine",
    "KvEvent",
    "Phase",
    "Played",
    "Request",
    "RtpLlmEngine",
    "SglangEngine",
    "Tally",
    "VllmEngine",
    "captured_workload",
    "first_alone",
    "fold",
    "play",
    "tally",
    "together",
]
