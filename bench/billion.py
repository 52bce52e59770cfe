"""A billion block accesses of endless new content through one stack of bounded depth: resident memory must not grow with the stream.

The stream is made chunk by chunk from a seed and never stored: sessions drawn by Zipf grow turn by turn and send their whole chain each
time; one that has grown long starts afresh with new content; every tenth request or so is a one-off. So distinct blocks grow for ever.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.reuse.run_exact import RunStack
from bench.timing import Took, machine, peak_rss_bytes, rss_bytes, took
from ingest.errors import UsageError

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

BLOCKS = 1_000_000_000
DEPTH_BLOCKS = 1 << 20
CHUNK_BLOCKS = 1 << 22
REPORT_AT = (0.1, 0.5, 1.0)
SEED = 1

SESSIONS, ZIPF = 4096, 1.0
PROMPTS, PROMPT_BLOCKS = 16, 64  # system prompts, each shared by the sessions that drew it
TURN_BLOCKS = 48  # a turn adds 1 to this many
LONGEST_BLOCKS = 2048
ONE_OFF_OF_1024, ONE_OFF_BLOCKS = 102, 512

# Scalars of the generator: state of the random numbers, keys given out, requests and distinct blocks so far.
RANDOM, KEYS, REQUESTS, DISTINCT, SCALARS = range(5)
REQUEST_GAP_US = 1000


def run(trace: str | None = None, limit: int | None = None) -> dict[str, Any]:
    """Resident memory after 10, 50 and 100 % of a billion blocks, and blocks per second of `touch`; `limit` requests end it sooner.

    Raises `UsageError` for a trace, of which this bench reads none. Cost: some ten seconds.
    """
    if trace is not None:
        raise UsageError("the billion bench makes its own stream; leave --trace out")
    return through_stack(BLOCKS, limit)


def through_stack(blocks: int, limit: int | None = None, depth: int = DEPTH_BLOCKS, seed: int = SEED) -> dict[str, Any]:
    """Run about `blocks` accesses (to the end of a chunk) or `limit` requests through a stack of `depth`."""
    warm_up = Stream(seed)
    RunStack(depth).touch(*warm_up.chunk(1))
    stream, stack, readings = Stream(seed), RunStack(depth), list[dict[str, Any]]()
    start_rss, engine, generator, runs, done, cold = rss_bytes(), Took(), Took(), 0, 0, 0
    while done < blocks and (limit is None or stream.requests < limit):
        made, columns = took(partial(stream.chunk, None if limit is None else limit - stream.requests))
        seconds, found = took(partial(stack.touch, *columns))
        generator, engine, runs, done = generator + made, engine + seconds, runs + len(found), done + columns[2].size
        cold += int(found.length[found.distance < 0].sum())
        if done >= REPORT_AT[len(readings)] * blocks or done >= blocks or stream.requests == limit:
            before = readings[-1] if readings else {"blocks": 0, "cold_blocks": 0, "cpu_s": 0.0}
            now = {"blocks": done, "cold_blocks": cold, "cpu_s": engine.cpu_s}
            readings.append({"share": done / blocks, **now, **_since(before, now), **_held(stream, stack, start_rss)})
    return {
        "blocks": done,
        "requests": stream.requests,
        "distinct_blocks": stream.distinct_blocks,
        "runs": runs,
        "max_depth_blocks": depth,
        "trimmed_blocks": stack.trimmed_blocks,
        "seed": seed,
        **engine.speed(done),
        "generator_cpu_s": generator.cpu_s,
        "peak_rss_bytes": peak_rss_bytes(),
        "readings": readings,
        **machine(),
    }


def _since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """Speed and share of cold blocks since the reading before: what is cold must be stored, and something else cut for it."""
    blocks, cold, cpu_s = (now[key] - before[key] for key in ("blocks", "cold_blocks", "cpu_s"))
    return {"blocks_per_second": blocks / cpu_s, "cold_ratio": cold / blocks}


def _held(stream: Stream, stack: RunStack, start_rss: int) -> dict[str, int]:
    rss = rss_bytes()
    return {
        "distinct_blocks": stream.distinct_blocks,
        "stack_blocks": stack.depth_blocks,
        "stack_bytes": stack.nbytes,
        "rss_bytes": rss,
        "rss_growth_bytes": rss - start_rss,
    }


class Stream:
    """The synthetic stream: the same seed gives the same requests, however it is cut into chunks. Memory: one chunk and the sessions."""

    def __init__(self, seed: int, chunk_blocks: int = CHUNK_BLOCKS) -> None:
        self._at = np.zeros(SCALARS, np.uint64)
        self._at[RANDOM], self._at[DISTINCT] = seed, PROMPTS * PROMPT_BLOCKS
        self._keys, self._lengths = np.zeros(SESSIONS, np.uint64), np.zeros(SESSIONS, np.int64)
        weights = np.arange(1, SESSIONS + 1) ** -ZIPF
        self._drawn_below = np.cumsum(weights) / weights.sum()
        self._hashes = np.empty(max(chunk_blocks, LONGEST_BLOCKS), np.uint64)
        self._ends = np.zeros(self._hashes.size // PROMPT_BLOCKS + 2, np.int64)

    @property
    def requests(self) -> int:
        """Requests given so far."""
        return int(self._at[REQUESTS])

    @property
    def distinct_blocks(self) -> int:
        """Different blocks given so far, all system prompts among them from the start."""
        return int(self._at[DISTINCT])

    def chunk(self, requests: int | None = None) -> tuple[I64, I64, U64]:
        """The next requests, as `RunStack.touch` takes them: as many as fit in a chunk, or fewer. Views, good until the next chunk."""
        first = self.requests
        most = self._ends.size - 1 if requests is None else min(requests, self._ends.size - 1)
        count = _fill(self._at, self._keys, self._lengths, self._drawn_below, self._hashes, self._ends, most)
        ts_us = np.arange(first, first + count, dtype=np.int64) * REQUEST_GAP_US
        return ts_us, self._ends[: count + 1], self._hashes[: self._ends[count]]


@nb.njit(cache=True, nogil=True)
def _mix(value: Any) -> Any:
    mixed = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@nb.njit(cache=True, nogil=True)
def _draw(at: U64) -> Any:
    at[RANDOM] += np.uint64(0x9E3779B97F4A7C15)
    return _mix(at[RANDOM])


@nb.njit(cache=True, nogil=True)
def _new_key(at: U64) -> Any:
    at[KEYS] += np.uint64(1)
    return _mix(at[KEYS] << np.uint64(8))


@nb.njit(cache=True, nogil=True)
def _next_chain(at: U64, keys: U64, lengths: I64, drawn_below: npt.NDArray[np.float64]) -> tuple[Any, Any, Any]:
    """Key, length and number of new blocks of the next request's chain; its session has taken its turn."""
    if _draw(at) & np.uint64(1023) < ONE_OFF_OF_1024:
        length = np.int64(1 + PROMPT_BLOCKS + _draw(at) % np.uint64(ONE_OFF_BLOCKS))
        return _new_key(at), length, length - PROMPT_BLOCKS
    share = np.float64(_draw(at) >> np.uint64(11)) / 9007199254740992.0
    session = np.searchsorted(drawn_below, share)  # the last of them is 1, and a share is below that
    turn = np.int64(1 + _draw(at) % np.uint64(TURN_BLOCKS))
    if lengths[session] == 0 or lengths[session] + turn > LONGEST_BLOCKS:
        keys[session], lengths[session] = _new_key(at), PROMPT_BLOCKS
    lengths[session] += turn
    return keys[session], lengths[session], turn


@nb.njit(cache=True, nogil=True)
def _fill(at: U64, keys: U64, lengths: I64, drawn_below: npt.NDArray[np.float64], hashes: U64, ends: I64, most: int) -> int:
    """Write chains of at most `most` requests while any chain would still fit; returns their number."""
    count, end = 0, 0
    while count < most and end + LONGEST_BLOCKS <= hashes.size:
        key, length, new = _next_chain(at, keys, lengths, drawn_below)
        prompt = _mix(np.uint64(0xFFFFFFFF) + (key & np.uint64(PROMPTS - 1)))
        for i in range(PROMPT_BLOCKS):
            hashes[end + i] = _mix(prompt + np.uint64(i))
        for i in range(PROMPT_BLOCKS, length):
            hashes[end + i] = _mix(key + np.uint64(i))
        at[DISTINCT] += np.uint64(new)
        count, end = count + 1, end + length
        ends[count] = end
    at[REQUESTS] += np.uint64(count)
    return count
