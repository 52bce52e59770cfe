"""Log bins for distances and reuse times: exact below 32, then 32 bins to the octave, integers only (the HDR histogram layout).

A value is never more than 1/32 of itself away from its bin's lower edge, so a curve read at bin edges is exact and between
them wrong by the mass of one bin at most.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

SUB_BITS = 5
SUB_BINS = 1 << SUB_BITS
MAX_BITS = 40
N_BINS = SUB_BINS * (MAX_BITS - SUB_BITS + 1)

I64 = npt.NDArray[np.int64]


@nb.njit(cache=True, nogil=True)
def bin_of(value: int) -> int:
    """Bin of a value in [0, 2^40); larger values share the last bin, negative ones the first. Cost: at most 35 shifts."""
    if value < SUB_BINS:
        return max(value, 0)
    if value >= 1 << MAX_BITS:
        return N_BINS - 1
    shift = 0
    while value >> shift >= 2 * SUB_BINS:
        shift += 1
    return SUB_BINS * shift + (value >> shift)


@nb.njit(cache=True, nogil=True)
def bin_edges(index: int) -> tuple[int, int]:
    """Edges (lo, hi) of a bin in [0, N_BINS): it holds exactly the values lo <= value < hi, and hi - lo <= max(1, lo / 32)."""
    shift = max(index // SUB_BINS - 1, 0)
    lo = (index - SUB_BINS * shift) << shift
    return lo, lo + (1 << shift)


@nb.njit(cache=True, nogil=True)
def bins_of(values: I64) -> npt.NDArray[np.int32]:
    """Bin of every value of an int64 array."""
    out = np.empty(values.size, np.int32)
    for i in range(values.size):
        out[i] = bin_of(values[i])
    return out


@nb.njit(cache=True, nogil=True)
def edges_of(indices: npt.NDArray[np.int32]) -> tuple[I64, I64]:
    """Edges of every bin of an integer array: (lo int64[n], hi int64[n]), half-open."""
    lo, hi = np.empty(indices.size, np.int64), np.empty(indices.size, np.int64)
    for i in range(indices.size):
        lo[i], hi[i] = bin_edges(indices[i])
    return lo, hi
