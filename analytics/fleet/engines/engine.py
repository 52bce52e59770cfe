"""What every engine model shares: requests, KV events, the waiting queue and the batches published."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["stored", "removed", "cleared"]


class KvEvent(NamedTuple):
    """One KV event: which blocks it is about, and for a store the block before them (-1 at a prompt's start)."""

    kind: Kind
    blocks: tuple[int, ...] = ()
    parent: int = -1


Batch = tuple[KvEvent, ...]


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through an engine; it is done with its first token, as on a Prefill instance.

    `blocks` are its full blocks: dense ids >= 0, each standing for all tokens up to its end. `cached_tokens` is -1 until the prompt is
    scheduled, then what the engine reports as reused.
    """

    blocks: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int = -1
    done: bool = False


class Engine(ABC):
    """One instance: `submit` prompts, `step` the scheduler, read `cached_tokens` and the published batches.

    Raises `ValueError` for sizes below 1. Memory: batches are kept until `take` is called.
    """

    def __init__(self, capacity_blocks: int, block_size: int, max_step_tokens: int, max_running: int) -> None:
        if min(capacity_blocks, block_size, max_step_tokens, max_running) < 1:
            raise ValueError("an engine needs at least one block, one token a block, and one token and one request a step")
        self.capacity_blocks, self.block_size = capacity_blocks, block_size
        self.max_step_tokens, self.max_running = max_step_tokens, max_running
        self._waiting: deque[Request] = deque()
        self._pending: list[KvEvent] = []
        self._batches: list[Batch] = []

    def submit(self, blocks: Sequence[int], prompt_tokens: int) -> Request:
        """Queue a prompt. Raises `ValueError` if it is empty, if its blocks do not fit its tokens, or if it can never fit the cache."""
        if prompt_tokens < 1 or len(blocks) != prompt_tokens // self.block_size or any(block < 0 for block in blocks):
            raise ValueError(f"{prompt_tokens} tokens hold {prompt_tokens // self.block_size} full blocks with ids >= 0")
        if self._most_blocks(prompt_tokens) > self.capacity_blocks:
            raise ValueError(f"a prompt of {prompt_tokens} tokens does not fit {self.capacity_blocks} blocks of {self.block_size}")
        request = Request(tuple(blocks), prompt_tokens)
        self._waiting.append(request)
        return request

    @abstractmethod
    def step(self) -> bool:
        """One turn of the scheduler; false if there was nothing to do."""

    @abstractmethod
    def clear(self) -> bool:
        """Forget every cached block, as the engine's reset call does; false, and nothing done, while requests are under way."""

    @abstractmethod
    def resident(self) -> Counter[int]:
        """Cached copies by block. Cost: O(capacity)."""

    def take(self) -> list[Batch]:
        """The batches published since the last call, in order."""
        batches, self._batches = self._batches, []
        return batches

    def _blocks_of(self, prompt_tokens: int) -> int:
        return -(-prompt_tokens // self.block_size)

    def _most_blocks(self, prompt_tokens: int) -> int:
        """Blocks that a prompt needs on an empty instance."""
        return self._blocks_of(prompt_tokens)

    def _reusable(self, request: Request) -> int:
        """Blocks a look-up may return: the last token is always computed, since its logits are wanted."""
        return min(len(request.blocks), (request.prompt_tokens - 1) // self.block_size)

    def _publish(self) -> None:
        if self._pending:
            self._batches.append(tuple(self._pending))
            self._pending = []


def fold(batches: Iterable[Batch]) -> Counter[int]:
    """Copies by block that a consumer counts from a stream: one up per stored block, one down per removed, none after a clear.

    Raises `ValueError` where a block is removed that is not held. Cost: O(blocks named).
    """
    held: Counter[int] = Counter()
    for event in (event for batch in batches for event in batch):
        if event.kind == "cleared":
            held.clear()
        elif event.kind == "stored":
            held.update(event.blocks)
        else:
            for block in event.blocks:
                if held[block] < 1:
                    raise ValueError(f"block {block} is removed but not held")
                held[block] -= 1
    return +held
