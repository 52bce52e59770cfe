"""Low-cardinality string columns as integer codes, and grouping by several of them without hashing a string per row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]
_DENSE = 1 << 20  # code spaces up to this size are counted densely


class Coded(NamedTuple):
    """`codes` int64[n] into `names`, -1 for null."""

    codes: Ints
    names: list[str]


def coded(column: pa.Array) -> Coded:
    """Codes of a string column; free where the column is dictionary-encoded already."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    indices = encoded.indices if encoded.null_count == 0 else pc.fill_null(encoded.indices, -1)
    return Coded(indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist())


def recoded(column: pa.Array, table: Mapping[str, int]) -> Ints:
    """`table`'s value of every string, -1 for null and for strings that it lacks."""
    codes, names = coded(column)
    return np.array([*(table.get(name, -1) for name in names), -1], np.int64)[codes]


def group(columns: Sequence[Coded]) -> tuple[Ints, list[tuple[str, ...]]]:
    """Group number of every row and the groups' keys in ascending order; null counts as ''. Cost: O(rows) per column."""
    combined, space = np.zeros(len(columns[0].codes), np.int64), 1
    for codes, names in columns:
        combined = combined * (len(names) + 1) + codes + 1
        space *= len(names) + 1
    if space > _DENSE:
        distinct, combined = np.unique(combined, return_inverse=True)
        present = np.arange(len(distinct))
    else:
        distinct = present = np.flatnonzero(np.bincount(combined, minlength=1)) if len(combined) else np.zeros(0, np.int64)
    keys = [_key(int(code), columns) for code in distinct]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    number = np.zeros(int(present.max(initial=0)) + 1, np.int64)
    number[present[order]] = np.arange(len(order))
    return number[combined.reshape(-1)], [keys[i] for i in order]


def _key(code: int, columns: Sequence[Coded]) -> tuple[str, ...]:
    parts = []
    for _, names in reversed(columns):
        code, digit = divmod(code, len(names) + 1)
        parts.append(names[digit - 1] if digit else "")
    return tuple(reversed(parts))


def sums(number: Ints, values: Mapping[str, Ints], groups: int) -> dict[str, pa.Array]:
    """Sum of every column per group, as UInt64; exact while a sum stays below 2^53."""
    return {
        name: pa.array(np.bincount(number, weights=column.astype(np.float64), minlength=groups).astype(np.uint64))
        for name, column in values.items()
    }
