"""A counting Bloom filter, for policies that compare how often two blocks were asked for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.queues import kernel

I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]


class Sketch(NamedTuple):
    """`counters` int32[room], of which each key has `hashes`; none that is raised exceeds `most`.

    With `minimal` only the least of a key's counters rise, which keeps errors small. Source: Cohen and Matias, SIGMOD 2003.
    """

    counters: I32
    hashes: int
    most: int
    minimal: bool


def make_sketch(counters: int, hashes: int, most: int, minimal: bool = True) -> Sketch:
    """An empty sketch."""
    return Sketch(np.zeros(max(counters, hashes), np.int32), hashes, most, minimal)


@kernel
def estimate(sketch: Sketch, key: int) -> int:
    """Times a key was added since it was last halved, or more where others share all its counters."""
    at, step = _places(sketch, key)
    least = sketch.most
    for _ in range(sketch.hashes):
        least = min(least, sketch.counters[at])
        at = (at + step) % sketch.counters.size
    return least


@kernel
def add(sketch: Sketch, key: int) -> None:
    """Count a key once."""
    least = estimate(sketch, key)
    if least >= sketch.most:
        return
    at, step = _places(sketch, key)
    for _ in range(sketch.hashes):
        if sketch.counters[at] == least or not sketch.minimal:
            sketch.counters[at] += 1
        at = (at + step) % sketch.counters.size


@kernel
def halve(sketch: Sketch) -> None:
    """Forget half of everything. Cost: O(room)."""
    for i in range(sketch.counters.size):
        sketch.counters[i] >>= 1


@kernel
def _places(sketch: Sketch, key: int) -> tuple[int, int]:
    """First counter of a key and the step to the next, by splitmix64."""
    x = (np.uint64(key) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    room = sketch.counters.size
    first, step = (x >> np.uint64(32)) % np.uint64(room), (x & np.uint64(0xFFFFFFFF)) % np.uint64(max(room - 1, 1))
    return np.int64(first), np.int64(step) + 1  # type: ignore[return-value]
