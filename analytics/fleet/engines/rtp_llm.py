"""RTP-LLM: the least recent leaf leaves with its chain up to the next fork; resident prompts never leave."""

from __future__ import annotations

from collections.abc import Sequence

from analytics.fleet.engines.sglang import SglangEngine


class RtpLlmEngine(SglangEngine):
    """One RTP-LLM instance with its prefix tree on: prompts are cached when they are done, which here is in the step that computes them.

    Sharers in one step miss, those of the next step hit. RTP-LLM reports to its own cache manager in another form; stores and removals here
    stand for its additions and deletions, the clear at the start for its registration. No captured stream was at hand: unlike the other two
    models this one is held against its description only.
    Source: RTP-LLM, `BlockCache` and `SharedBlockCache::selectAndEvict`.
    """

    overlap = False
    spare_blocks = 0
    whole_chains = True

    def make_resident(self, blocks: Sequence[int]) -> None:
        """Keep a cached chain until `clear`; a prompt that does not fit beside what is kept waits until then.

        Raises `ValueError` where the chain is not cached whole.
        """
        found, node = self._match(tuple(blocks))
        if found < len(blocks):
            raise ValueError(f"{len(blocks) - found} of {len(blocks)} blocks are not cached")
        self._lock(node, 1)
