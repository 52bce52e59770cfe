"""Counter stacks: the curve from counts of distinct blocks alone, without remembering any block.

A counter started every so often counts the distinct blocks since then. When a batch of references makes a younger counter grow by more than
an older one, the difference is that many references to blocks last touched between their starts, at a distance between their counts.
Counters are HyperLogLog sketches, so nothing identifies a block. Source: Wires et al., Characterizing storage workloads with counter
stacks, OSDI 2014. Cardinalities: Flajolet et al. 2007, with Ertl's estimator (New cardinality estimation algorithms for HyperLogLog
sketches, 2017), which needs no correction table.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.curve import Curve
from analytics.estimators.points import accumulate, block_values
from analytics.estimators.sampling import mixed, salt_of
from analytics.reuse.bins import N_BINS, bin_edges, bin_of, edges_of
from analytics.reuse.chains import ChainColumns

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]

_ALPHA = 0.5 / math.log(2.0)
_BATCHES = 2048


def counter_stacks(
    chains: ChainColumns, *, batch_blocks: int | None = None, precision: int = 12, delta: float = 0.02, seed: int = 0
) -> Curve:
    """Curve from HyperLogLog counters of 2**`precision` registers, a new one every `batch_blocks` references (a 2048th of the trace).

    A counter within the share `delta` of its older neighbour is given up. Tokens and token_context are those of a batch on average, since
    counts do not tell which block came back. Distances are sure to about `delta` + 1/sqrt(registers), the least is about a batch. Mean
    error on the traces of docs/estimators.md: 0.003; 0.014 on WEKA, whose requests are longer than a batch, and 0.013 on Zipf 1.0, most of
    whose distances are shorter than one.
    Raises `ValueError` for a precision outside 4 to 16 or a delta outside (0, 1).
    Cost: a few register updates a block, and one estimate a batch and live counter (about log(distinct) / delta of them); memory as many
    sketches.
    """
    if not 4 <= precision <= 16 or not 0.0 < delta < 1.0:
        raise ValueError(f"precision {precision} must be 4 to 16 and delta {delta} between 0 and 1")
    cuts = _cuts(chains.offsets, batch_blocks or max(chains.blocks // _BATCHES, 1))
    means, mass, counters, done = _means(chains, cuts), np.zeros((3, N_BINS)), _counters(64, precision), 0
    while done < cuts.size - 1:
        done = _run(counters, cuts, chains.hashes, salt_of(seed), precision, delta, means, mass, done)
        if done < cuts.size - 1:
            counters = _wider(counters, precision)
    held = np.flatnonzero(mass[0])
    lo, hi = edges_of(held.astype(np.int32))
    return accumulate(chains, (lo + hi - 1) / 2, mass[:, held])


class Counters(NamedTuple):
    """One row a counter: `registers` uint8[n, m], `power` the sum of 2**-register over those set, `unset` how many are not, and the
    `estimate` of its distinct blocks.

    `order` holds the rows in use, oldest counter first, then the free ones; `live` int64[1] how many are in use.
    """

    registers: U8
    power: F64
    unset: I64
    estimate: F64
    order: I64
    live: I64


def _counters(rows: int, precision: int) -> Counters:
    registers = np.zeros((rows, 1 << precision), np.uint8)
    power, unset, count = np.zeros(rows), np.full(rows, 1 << precision), np.zeros(rows)
    return Counters(registers, power, unset, count, np.arange(rows), np.zeros(1, np.int64))


def _wider(old: Counters, precision: int) -> Counters:
    new, rows = _counters(2 * old.power.size, precision), old.power.size
    new.registers[:rows], new.power[:rows], new.unset[:rows] = old.registers, old.power, old.unset
    new.estimate[:rows], new.order[:rows], new.live[:] = old.estimate, old.order, old.live
    return new


def _cuts(offsets: I64, batch_blocks: int) -> I64:
    """Ends of batches of whole requests, each of at least `batch_blocks` references but the last."""
    marks = np.arange(0, offsets[-1] + batch_blocks, batch_blocks)
    return np.unique(offsets[np.searchsorted(offsets, marks).clip(0, offsets.size - 1)])


def _means(chains: ChainColumns, cuts: I64) -> F64:
    """Blocks (1), tokens and token_context of a mean reference of each batch, float64[batches, 3]."""
    starts = np.cumsum(np.diff(cuts, prepend=0))[:-1]
    tokens, context = block_values(chains, np.arange(chains.blocks))
    sizes = np.diff(cuts)
    if not sizes.size:
        return np.zeros((0, 3))
    sums = [np.add.reduceat(values, starts) / sizes for values in (tokens, context)]
    return np.column_stack([np.ones(sizes.size), *sums])


@nb.njit(cache=True, nogil=True)
def _cardinality(power: float, unset: int, size: int) -> float:
    """Ertl's improved estimate from a sketch of `size` registers."""
    if unset == size:
        return 0.0
    x, weight = unset / size, 1.0
    sigma = x
    while x > 1e-300:
        x *= x
        grown = sigma + x * weight
        if grown == sigma:
            break
        sigma, weight = grown, weight * 2.0
    return _ALPHA * size * size / (size * sigma + power)


@nb.njit(cache=True, nogil=True)
def _note(c: Counters, key: Any, salt: Any, precision: int) -> None:
    """Count one block: the youngest counters first, until one has its register as high, since then all older ones have."""
    bits = mixed(key, salt)
    register, rest = np.int64(bits & np.uint64((1 << precision) - 1)), bits >> np.uint64(precision)
    rank = 1
    while rest & np.uint64(1) == 0 and rank <= 64 - precision:
        rank, rest = rank + 1, rest >> np.uint64(1)
    for at in range(c.live[0] - 1, -1, -1):
        row = c.order[at]
        before = np.int64(c.registers[row, register])
        if before >= rank:
            return
        c.registers[row, register] = rank
        c.power[row] += 2.0 ** float(-rank)
        if before > 0:
            c.power[row] -= 2.0 ** float(-before)
        else:
            c.unset[row] -= 1


@nb.njit(cache=True, nogil=True)
def _spread(mass: F64, lo: float, hi: float, hits: float, mean: F64) -> None:
    """Spread `hits` references evenly over distances [lo, hi) into the bins that it crosses."""
    lo, hi = max(lo, 0.0), max(hi, lo + 1.0, 1.0)
    at = bin_of(int(lo))
    left = lo
    while left < hi:
        right = min(float(bin_edges(at)[1]), hi)
        part = hits * (right - left) / (hi - lo)
        for row in range(3):
            mass[row, at] += part * mean[row]
        left, at = right, at + 1


@nb.njit(cache=True, nogil=True)
def _prune(c: Counters, delta: float) -> None:
    """Give up counters that count nearly what their older neighbour does; the newest stays."""
    kept = 1
    for at in range(1, c.live[0]):
        row = c.order[at]
        if at == c.live[0] - 1 or c.estimate[row] < (1.0 - delta) * c.estimate[c.order[kept - 1]]:
            c.order[at], c.order[kept] = c.order[kept], row
            kept += 1
    c.live[0] = kept


@nb.njit(cache=True, nogil=True)
def _start(c: Counters) -> None:
    """Begin a new, youngest counter."""
    row = c.order[c.live[0]]
    c.registers[row, :] = 0
    c.power[row], c.unset[row], c.estimate[row] = 0.0, c.registers.shape[1], 0.0
    c.live[0] += 1


@nb.njit(cache=True, nogil=True)
def _run(c: Counters, cuts: I64, hashes: U64, salt: Any, precision: int, delta: float, means: F64, mass: F64, done: int) -> int:
    """Batches from `done` on, until all rows are in use; returns how far it came."""
    size = 1 << precision
    for batch in range(done, cuts.size - 1):
        if c.live[0] == c.power.size:
            return batch
        _start(c)
        for i in range(cuts[batch], cuts[batch + 1]):
            _note(c, hashes[i], salt, precision)
        older_grew, older = 0.0, 0.0
        for at in range(c.live[0]):
            row = c.order[at]
            before = c.estimate[row]
            c.estimate[row] = _cardinality(c.power[row], c.unset[row], size)
            grew = c.estimate[row] - before
            if at > 0:
                _spread(mass, (before + c.estimate[row]) / 2, older, grew - older_grew, means[batch])
            older_grew, older = grew, (before + c.estimate[row]) / 2
        _spread(mass, 0.0, older, cuts[batch + 1] - cuts[batch] - older_grew, means[batch])
        _prune(c, delta)
    return cuts.size - 1
