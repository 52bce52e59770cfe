"""The workload whose event streams were captured from real engines, and a driver that plays it on an engine model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from analytics.fleet.engines.engine import Batch, Engine, Request

BLOCK_SIZE = 16
PREFIX_BLOCKS, SUFFIX_BLOCKS, UNIQUE_BLOCKS = 32, 8, 64  # 512, 128 and 1024 tokens
SHARERS, UNIQUE_PROMPTS, EVICT_CONCURRENCY, AFTER_RESET = 8, 120, 4, 2


@dataclass(frozen=True)
class Phase:
    """Prompts (ids of their full blocks, no token beyond them), `concurrency` at a time; `clear_first` resets the cache before."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    concurrency: int = 1
    clear_first: bool = False


@dataclass
class Played:
    """What an engine answered: cached tokens by phase, in order of the prompts, and all batches in order."""

    cached_tokens: dict[str, list[int]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)


class Tally(NamedTuple):
    """A stream in numbers: batches, events by kind, and blocks named in stores and removals."""

    batches: int
    stored: int
    removed: int
    cleared: int
    stored_blocks: int
    removed_blocks: int


def captured_workload() -> list[Phase]:
    """The six phases of the capture: 8 sharers of 512 tokens, the same again, 8 other sharers at once, 120 unique prompts, the first again.

    Source: the captures' notes in the smg repository (KV event streams of vLLM 0.31.0 and SGLang 0.5.21, October 2026).
    """
    ids = iter(range(1_000_000))

    def fresh(count: int) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(count))

    def sharers() -> tuple[tuple[int, ...], ...]:
        prefix = fresh(PREFIX_BLOCKS)
        return tuple(prefix + fresh(SUFFIX_BLOCKS) for _ in range(SHARERS))

    shared, burst = sharers(), sharers()
    unique = tuple(fresh(UNIQUE_BLOCKS) for _ in range(UNIQUE_PROMPTS))
    return [
        Phase("shared", shared),
        Phase("repeat", shared),
        Phase("burst", burst, SHARERS),
        Phase("evict", unique, EVICT_CONCURRENCY),
        Phase("recheck", shared),
        Phase("after_reset", shared[:AFTER_RESET], clear_first=True),
    ]


Arrivals = Callable[[Phase, int, int], Sequence[int]]


def together(phase: Phase, wave: int, size: int) -> Sequence[int]:
    """All prompts of a wave are there when the engine takes its next step."""
    return [size]


def first_alone(phase: Phase, wave: int, size: int) -> Sequence[int]:
    """An idle engine starts a wave's first prompt before the others are there."""
    return [1, size - 1] if size > 1 else [1]


def play(engine: Engine, phases: Iterable[Phase], arrivals: Arrivals = together) -> Played:
    """Send each phase in waves of its concurrency, the next when the last one is done.

    `arrivals` says how many prompts of a wave reach the engine before each of its next steps. Raises `RuntimeError` if the engine refuses
    to clear its cache.
    """
    played = Played()
    _drain(engine)
    for phase in phases:
        if phase.clear_first:
            if not engine.clear():
                raise RuntimeError("the engine does not clear its cache while requests are under way")
            _drain(engine)
        answered: list[Request] = []
        for wave, start in enumerate(range(0, len(phase.prompts), phase.concurrency)):
            prompts = list(phase.prompts[start : start + phase.concurrency])
            for count in arrivals(phase, wave, len(prompts)):
                answered += [engine.submit(blocks, len(blocks) * engine.block_size) for blocks in prompts[:count]]
                del prompts[:count]
                engine.step()
            assert not prompts, "arrivals() must account for the whole wave"
            _drain(engine)
        played.cached_tokens[phase.name] = [request.cached_tokens for request in answered]
    played.batches = engine.take()
    return played


def _drain(engine: Engine) -> None:
    while engine.step():
        pass


def tally(batches: Sequence[Batch]) -> Tally:
    """Count a stream's events and the blocks that they name."""
    kinds: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    for event in (event for batch in batches for event in batch):
        kinds[event.kind] += 1
        blocks[event.kind] += len(event.blocks)
    return Tally(len(batches), kinds["stored"], kinds["removed"], kinds["cleared"], blocks["stored"], blocks["removed"])
