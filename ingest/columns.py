"""Values on their way into ClickHouse: Arrow columns cast to the types of a table, query parameters to those of a query. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime

import pyarrow as pa

_SIMPLE: dict[str, pa.DataType] = {
    **{f"UInt{bits}": getattr(pa, f"uint{bits}")() for bits in (8, 16, 32, 64)},
    **{f"Int{bits}": getattr(pa, f"int{bits}")() for bits in (8, 16, 32, 64)},
    "Float32": pa.float32(),
    "Float64": pa.float64(),
    "String": pa.string(),
    "DateTime": pa.timestamp("s", "UTC"),
}
_UNITS = {"0": "s", "3": "ms", "6": "us", "9": "ns"}


def arrow_type(kind: str) -> pa.DataType:
    """Arrow type in which a column of a ClickHouse type is sent. Raises `ValueError` for a type that the schema does not use."""
    kind = _inner(kind)
    if match := re.fullmatch(r"Array\((.*)\)", kind):
        return pa.list_(arrow_type(match[1]))
    if match := re.fullmatch(r"Map\((.*), (\w+)\)", kind):
        return pa.map_(arrow_type(match[1]), arrow_type(match[2]))
    if match := re.match(r"DateTime64\(([0369])\b", kind):
        return pa.timestamp(_UNITS[match[1]], "UTC")
    simple = "DateTime" if kind.startswith("DateTime(") else kind
    if simple not in _SIMPLE:
        raise ValueError(f"no Arrow type is set for {kind}")
    return _SIMPLE[simple]


def _inner(kind: str) -> str:
    while match := re.fullmatch(r"(?:Nullable|LowCardinality)\((.*)\)", kind):
        kind = match[1]
    return kind


def fit(column: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """The column in the Arrow type of ClickHouse type `kind`, with no value changed.

    Integers for a time are counts of its own unit since the epoch; times without a zone are UTC. Raises `ValueError` that says why not:
    nulls where the type has none, a value out of range, a fraction lost.
    """
    if column.null_count and "Nullable(" not in kind:
        raise ValueError(f"{column.null_count} nulls, but {kind} has none")
    target = arrow_type(kind)
    if pa.types.is_string(target) and (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        return column
    try:
        if pa.types.is_timestamp(target) and pa.types.is_integer(column.type):
            column = column.cast(pa.int64())
        return column if column.type == target else column.cast(target)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{column.type} does not fit {kind}: {str(error).splitlines()[0]}") from error


def identify(block: pa.Table, kinds: Mapping[str, str]) -> tuple[str, dict[str, object]]:
    """An SQL condition with its parameters that the first row of a block meets: equality in every text, integer and time it holds.

    `kinds` are the ClickHouse types by column. Nulls, floats, bytes, lists and maps are left out.
    """
    tests: list[str] = []
    params: dict[str, object] = {}
    for index, name in enumerate(block.column_names):
        value = block.column(name)[0].as_py()
        if isinstance(value, str | int | datetime):
            tests.append(f"`{name}` = {{v{index}:{_inner(kinds[name])}}}")
            params[f"v{index}"] = value
    return " AND ".join(tests) or "1", params


def bind(types: Mapping[str, str], params: Mapping[str, object]) -> dict[str, object]:
    """Parameters in the form that the server parses by their declared `types`: times become UTC text, ISO 8601 is accepted for them.

    Raises `ValueError` that names a missing parameter or one that is no time.
    """
    missing = [name for name in types if name not in params]
    if missing:
        raise ValueError(f"parameter {', '.join(missing)} is not set")
    return {name: _bound(name, value, types.get(name, "")) for name, value in params.items()}


def _bound(name: str, value: object, kind: str) -> object:
    if kind.startswith("DateTime") and isinstance(value, str) and not value.isdigit():
        try:
            value = datetime.fromisoformat(value)
        except ValueError as error:
            raise ValueError(f"parameter {name}={value!r} is not a time; write 2026-01-31 12:00:00 (UTC)") from error
    if isinstance(value, datetime):
        moment = value.astimezone(UTC) if value.tzinfo else value
        return moment.strftime("%Y-%m-%d %H:%M:%S.%f" if moment.microsecond else "%Y-%m-%d %H:%M:%S")
    return value.isoformat() if isinstance(value, date) else value
