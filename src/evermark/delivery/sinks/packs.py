"""Bundles made column by column: no Python object per event, unless one of them is refused.

The keys of a job are dealt out to a few shares; the events of a share keep their order. Each piece of the job is
rendered, ordered by share and cut into bundles at once; what does not fill a bundle waits for the next piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.delivery.body import (
    BUNDLE_BYTES_AROUND,
    Rendering,
    around,
    bundle_id_of,
    delivery_id_column,
    render_column,
)

I64 = npt.NDArray[np.int64]

# One event on its way: its row in the job, its webhook id, its body.
Parcel = tuple[int, str, bytes]


@dataclass(frozen=True)
class Pack:
    """One bundle, ready to be sent, and what it was made of."""

    rows: I64
    ident: str
    body: bytes
    idents: pa.Array
    bodies: pa.Array

    def parcels(self) -> list[Parcel]:
        return list(zip(self.rows.tolist(), self.idents.to_pylist(), self.bodies.to_pylist(), strict=True))


class Packer:
    def __init__(self, how: Rendering, bundle: int, shares: int, body_bytes_max: int) -> None:
        self._how = how
        self._bundle = bundle
        self._shares = shares
        self._room = body_bytes_max - BUNDLE_BYTES_AROUND
        self._rows: I64 = np.empty(0, np.int64)
        self._of: I64 = np.empty(0, np.int64)
        self._idents: list[pa.Array] = []
        self._bodies: list[pa.Array] = []
        self.body_bytes_max = 0  # of the bodies rendered so far

    def pack(self, events: pa.Table | pa.RecordBatch, first: int, keys: I64, *, last: bool) -> list[tuple[int, Pack]]:
        """The bundles that are full now, each with its share; with the last piece of a job those that are not, too."""
        rendered = render_column(events, self._how)
        longest = pc.max(pc.binary_length(rendered)).as_py() or 0
        self.body_bytes_max = max(self.body_bytes_max, longest)
        rows = np.concatenate([self._rows, np.arange(first, first + events.num_rows)])
        of = np.concatenate([self._of, keys % self._shares])
        column = events.column("event_id")
        ids = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        idents = pa.concat_arrays([*self._idents, delivery_id_column(ids, self._how.replay_id)])
        bodies = pa.concat_arrays([*self._bodies, rendered])
        order = np.argsort(of, kind="stable")
        cuts, left = self._cuts(of[order], pc.binary_length(bodies).to_numpy()[order], last=last)
        self._rows, self._of = rows[order[left]], of[order[left]]
        self._idents, self._bodies = [idents.take(pa.array(order[left]))], [bodies.take(pa.array(order[left]))]
        sent = order[~left]
        if not len(sent):
            return []
        chosen = pa.array(sent)
        return self._packs(rows[sent], of[sent], idents.take(chosen), bodies.take(chosen), cuts)

    def _cuts(self, of: I64, sizes: I64, *, last: bool) -> tuple[I64, npt.NDArray[np.bool_]]:
        """Where bundles end among the rows that go now, and which rows wait. Rows come by share."""
        left = np.zeros(len(of), np.bool_)
        ends: list[int] = []
        gone = 0
        for start, stop in _runs(of):
            cut = self._cut(sizes[start:stop])
            if not last and cut and stop - start - (cut[-2] if len(cut) > 1 else 0) < self._bundle:
                cut = cut[:-1]  # not full yet
            taken = cut[-1] if cut else 0
            left[start + taken : stop] = True
            ends += [gone + end for end in cut]
            gone += taken
        return np.array([0, *ends], np.int64), left

    def _cut(self, sizes: I64) -> list[int]:
        """Ends of bundles within one share: as many as asked for, as far as they fit into one request."""
        count = len(sizes)
        if self._bundle * (self.body_bytes_max + 1) <= self._room:
            return [*range(self._bundle, count, self._bundle), count] if count else []
        ends: list[int] = []
        start, room = 0, self._room
        for n, size in enumerate(sizes.tolist()):
            room -= size + 1
            if n > start and (room < 0 or n - start == self._bundle):
                ends.append(n)
                start, room = n, self._room - size - 1
        return [*ends, count] if count else []

    def _packs(self, rows: I64, of: I64, idents: pa.Array, bodies: pa.Array, cuts: I64) -> list[tuple[int, Pack]]:
        before, after = around(self._how.style)
        ends = pa.array(cuts.astype(np.int32))
        texts = pc.binary_join(pa.ListArray.from_arrays(ends, bodies), b",").to_pylist()
        names = pc.binary_join(pa.ListArray.from_arrays(ends, idents), "\n").cast(pa.binary()).to_pylist()
        found: list[tuple[int, Pack]] = []
        for n, (start, stop) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            size = stop - start
            ident = bundle_id_of(sha256(names[n]))
            body = before + texts[n] + after
            pack = Pack(rows[start:stop], ident, body, idents.slice(start, size), bodies.slice(start, size))
            found.append((int(of[start]), pack))
        # The first rows of the job first, whichever share they are in.
        found.sort(key=lambda one: int(one[1].rows[0]))
        return found


def _runs(of: I64) -> list[tuple[int, int]]:
    """Where each value of an ordered array begins and ends."""
    if not len(of):
        return []
    starts = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(of)], strict=True))
