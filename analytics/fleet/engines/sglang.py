"""SGLang: a radix tree of pages, leaves evicted whole, prompts inserted only once their prefill is over."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from analytics.fleet.engines.engine import Engine, KvEvent, Request


@dataclass(slots=True, eq=False)
class _Node:
    """A stretch of pages that no prompt has left in the middle of; `locks` counts prompts under way that end in or below it."""

    blocks: tuple[int, ...]
    parent: _Node | None
    used: int
    locks: int = 0
    children: dict[int, _Node] = field(default_factory=dict)

    def free_leaf(self) -> bool:
        return not self.children and not self.locks


@dataclass(slots=True, eq=False)
class _Prefill:
    request: Request
    hit: int  # blocks
    node: _Node
    pages: int  # taken beyond the hit


class SglangEngine(Engine):
    """One SGLang instance with page size `block_size` and the overlap schedule.

    A step first launches the waiting prompts, in order, up to `max_step_tokens` new tokens and `max_running` prompts, then takes the
    result of the batch launched the step before: its prompts enter the tree, copies of pages that others inserted meanwhile are freed, and
    what has happened since is published as one batch. So sharers that are launched before the first one's result all miss. Room is made
    for the new tokens and one page a prompt more, and only for what is missing of that; unlocked leaves leave whole, the one used least
    recently first, and leaves that follow each other out form one removal. A look-up that ends inside a node splits it.
    A prompt longer than `max_step_tokens` runs alone and whole (SGLang cuts it in chunks).
    Cost: O(nodes log nodes) an eviction. Source: SGLang `radix_cache.py`, `allocation.py` and `scheduler.py`; that removals are joined and
    that only the missing pages are evicted is read off the captured stream.
    """

    overlap = True  # a batch's result is taken one step after its launch
    spare_blocks = 1  # asked for beyond what a prompt needs
    whole_chains = False  # an eviction goes on up to the next fork

    def __init__(self, capacity_blocks: int, block_size: int = 16, max_step_tokens: int = 16384, max_running: int = 256) -> None:
        super().__init__(capacity_blocks, block_size, max_step_tokens, max_running)
        self._clock = 0
        self._launched: list[_Prefill] = []
        self._root, self._free, self._evictable = self._empty()

    def _empty(self) -> tuple[_Node, int, int]:
        self._pending.append(KvEvent("cleared"))
        return _Node((), None, 0, locks=1), self.capacity_blocks, 0

    def step(self) -> bool:
        due, launched = self._launched, self._launch()
        self._launched = launched if self.overlap else []
        due = due if self.overlap else launched
        for prefill in due:
            self._finish(prefill)
        idle = not due and not launched
        worked = not idle or bool(self._pending)
        if due or idle:
            self._publish()
        return worked

    def clear(self) -> bool:
        if self._launched or self._waiting:
            return False
        self._root, self._free, self._evictable = self._empty()
        return True

    def resident(self) -> Counter[int]:
        return Counter(block for node in self._nodes() for block in node.blocks)

    def _most_blocks(self, prompt_tokens: int) -> int:
        return self._blocks_of(prompt_tokens) + self.spare_blocks

    # -- scheduling ---------------------------------------------------------------------------------------------------------------------

    def _launch(self) -> list[_Prefill]:
        batch: list[_Prefill] = []
        tokens = need = 0
        while self._waiting and len(batch) + len(self._launched) < self.max_running:
            request = self._waiting[0]
            hit, node = self._match(request.blocks[: self._reusable(request)])
            new_tokens, pages = request.prompt_tokens - hit * self.block_size, self._blocks_of(request.prompt_tokens) - hit
            self._lock(node, 1)
            if need + pages + self.spare_blocks > self._free + self._evictable or (batch and tokens + new_tokens > self.max_step_tokens):
                self._lock(node, -1)
                break
            self._waiting.popleft()
            request.cached_tokens = hit * self.block_size
            batch.append(_Prefill(request, hit, node, pages))
            tokens, need = tokens + new_tokens, need + pages + self.spare_blocks
        self._evict(need - self._free)
        self._free -= sum(prefill.pages for prefill in batch)
        return batch

    def _finish(self, prefill: _Prefill) -> None:
        request = prefill.request
        known = self._insert(request.blocks)
        self._free += prefill.pages - (len(request.blocks) - known)
        self._lock(prefill.node, -1)
        request.done = True

    # -- the tree -----------------------------------------------------------------------------------------------------------------------

    def _match(self, blocks: tuple[int, ...]) -> tuple[int, _Node]:
        """Blocks found from the start of `blocks` and the node where they end, split off if need be; all on the way count as used now."""
        now, node, found = self._tick(), self._root, 0
        while found < len(blocks) and blocks[found] in node.children:
            child = node.children[blocks[found]]
            child.used = now
            shared = _shared(child.blocks, blocks[found:])
            if shared < len(child.blocks):
                child = self._split(child, shared)
            node, found = child, found + shared
        return found, node

    def _split(self, node: _Node, at: int) -> _Node:
        assert node.parent is not None
        upper = _Node(node.blocks[:at], node.parent, self._tick(), node.locks, {node.blocks[at]: node})
        node.parent.children[node.blocks[0]] = upper
        node.blocks, node.parent = node.blocks[at:], upper
        return upper

    def _insert(self, blocks: tuple[int, ...]) -> int:
        """Add what is missing of `blocks` as one node; returns how many blocks were there before."""
        known, node = self._match(blocks)
        if known < len(blocks):
            node.children[blocks[known]] = _Node(blocks[known:], node, self._tick())
            self._evictable += len(blocks) - known
            self._pending.append(KvEvent("stored", blocks[known:], node.blocks[-1] if node.blocks else -1))
        return known

    def _tick(self) -> int:
        """The next moment: a node that is made while a prompt is matched is newer than those on its way."""
        self._clock += 1
        return self._clock

    def _lock(self, node: _Node, change: int) -> None:
        """Lock or unlock a node and all above it."""
        while node.parent is not None:
            if min(node.locks, node.locks + change) == 0:
                self._evictable -= change * len(node.blocks)
            node.locks += change
            node = node.parent

    def _evict(self, pages: int) -> None:
        """Free at least `pages` pages, if there are so many to evict."""
        if pages <= 0:
            return
        gone: list[int] = []
        leaves = [(node.used, serial, node) for serial, node in enumerate(self._nodes()) if node.free_leaf()]
        heapq.heapify(leaves)
        while len(gone) < pages and leaves:
            _, serial, node = heapq.heappop(leaves)
            parent = _drop(node, gone)
            while self.whole_chains and parent.free_leaf():
                parent = _drop(parent, gone)
            if parent.free_leaf():
                heapq.heappush(leaves, (parent.used, serial, parent))
        self._free += len(gone)
        self._evictable -= len(gone)
        self._removed(tuple(gone))

    def _removed(self, blocks: tuple[int, ...]) -> None:
        if self._pending and self._pending[-1].kind == "removed":
            self._pending[-1] = KvEvent("removed", self._pending[-1].blocks + blocks)
        elif blocks:
            self._pending.append(KvEvent("removed", blocks))

    def _nodes(self) -> Iterator[_Node]:
        """Every node but the root."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def _drop(node: _Node, gone: list[int]) -> _Node:
    """Take a leaf out of the tree, its blocks into `gone`; returns its parent."""
    parent = node.parent
    assert parent is not None
    gone.extend(node.blocks)
    del parent.children[node.blocks[0]]
    return parent


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common start."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
