"""Checkpoint bytes: nested dicts of numpy arrays, Arrow batches and plain values, packed with msgpack and compressed with zstd."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import zstandard

_ARRAY, _BATCH = 1, 2


def pack(state: dict[str, Any]) -> bytes:
    """Bytes of a state. Equal states give equal bytes. Cost: O(bytes)."""
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(state, enc_hook=_encode))


def unpack(data: bytes) -> dict[str, Any]:
    """State of `pack`'s bytes; arrays are writable copies."""
    raw = zstandard.ZstdDecompressor().decompress(data)
    return msgspec.msgpack.decode(raw, ext_hook=_decode, type=dict[str, Any])


def _encode(value: object) -> object:
    if isinstance(value, np.ndarray):
        head = msgspec.msgpack.encode([value.dtype.str, list(value.shape)])
        return msgspec.msgpack.Ext(_ARRAY, len(head).to_bytes(4, "little") + head + np.ascontiguousarray(value).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, pa.RecordBatch):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write_batch(value)
        return msgspec.msgpack.Ext(_BATCH, sink.getvalue().to_pybytes())
    raise TypeError(f"a checkpoint cannot hold {type(value).__name__}")


def _decode(code: int, data: memoryview) -> object:
    if code == _ARRAY:
        size = int.from_bytes(data[:4], "little")
        dtype, shape = msgspec.msgpack.decode(data[4 : 4 + size])
        return np.frombuffer(data[4 + size :], np.dtype(dtype)).reshape(shape).copy()
    table = pa.ipc.open_stream(pa.py_buffer(bytes(data))).read_all().combine_chunks()
    batches = table.to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
