"""Columns of text out of the bytes that a server sent, for all rows at once: of the outbox, and of any table."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from evermark.sources.postgres.read.pgoutput import I64, Mask, View

_ASCII_END = 128


def gather(view: View, start: I64, length: I64, present: Mask | None = None) -> pa.Array:
    """Many pieces of one buffer as a binary array; null where they are not `present`.

    Arrow sees the buffer as field, gap, field, gap …, and copies the fields out: no index per byte is ever made.
    """
    rows = len(start)
    if rows == 0:
        return pa.array([], pa.binary())
    offsets = np.empty(2 * rows, dtype=np.int32)
    offsets[0::2] = start
    offsets[1::2] = start + length
    spaced = pa.Array.from_buffers(pa.binary(), 2 * rows - 1, [None, pa.py_buffer(offsets), pa.py_buffer(view.data)])
    packed = spaced.take(pa.array(np.arange(0, 2 * rows, 2)))
    if present is None or present.all():
        return packed
    _, packed_offsets, values = packed.buffers()
    bitmap = pa.py_buffer(np.packbits(present, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), rows, [bitmap, packed_offsets, values])


def decoded(raw: pa.Array, encoding: str) -> tuple[pa.Array, Mask]:
    """Bytes as text, and the rows that are no text, which are null. The server sends its own encoding, and only UTF-8
    is checked there as we need it.
    """
    bad = np.zeros(len(raw), dtype=np.bool_)
    if encoding == "utf-8":
        text = raw.view(pa.string())
        if _is_ascii(raw):  # most are, which is seen at once
            return text, bad
        try:
            text.validate(full=True)
        except pa.ArrowInvalid:
            pass
        else:
            return text, bad
    values: list[str | None] = []
    for row, value in enumerate(raw.to_pylist()):
        try:
            values.append(None if value is None else value.decode(encoding))
        except UnicodeDecodeError:
            bad[row] = True
            values.append(None)
    return pa.array(values, pa.string()), bad


def _is_ascii(raw: pa.Array) -> bool:
    data = raw.buffers()[2]
    return data is None or not data.size or int(np.frombuffer(data, np.uint8).max()) < _ASCII_END
