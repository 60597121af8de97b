"""Events of some keys taken out of files of the log: what a person may ask for about another person's data.

Batch numbers and positions of all other events stay, so no reader's cursor means anything else than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evermark.event import EVENT, Op, with_all_columns
from evermark.log.base import LogFile
from evermark.log.compact import level_of
from evermark.log.kept_keys import members
from evermark.log.opened import rows_of
from evermark.log.read import FileRange
from evermark.log.write import FileWriter
from evermark.storage import Place, trouble_is_said

_LOOKED_AT = ["stream", "key", "previous_key"]
_TOLD_APART = [*_LOOKED_AT, "partition", "batch", "position", "tx", "event_id"]


@dataclass(frozen=True)
class Forgotten:
    """The events of one stream that have, or had, one of these keys."""

    stream: str
    keys: frozenset[str]

    def in_file(self, file: FileRange) -> int:
        """How many events of the file this is about."""
        pieces = rows_of(file.path, _LOOKED_AT)
        return sum(pc.sum(pc.or_(*self._marked(piece))).as_py() or 0 for piece in pieces)

    def rest_of(self, folder: Place, file: FileRange, files: Sequence[FileRange]) -> LogFile | None:
        """The file without them, durable and not yet committed; None: nothing is left of it. `files`: all of the log,
        as a transaction may be in several.
        """
        level = level_of(file.path)
        name = f"p{file.partition_min}-{f'c{level}-' if level else ''}b{file.batch_min}"
        with trouble_is_said(folder):
            writer = FileWriter(folder, name)
            try:
                for batch in self._left(file, self._taken_over(file, files)):
                    writer.write(batch)
                if (rest := writer.finish()).rows:
                    return rest
            except BaseException:
                writer.discard()
                raise
            writer.discard()
        return None

    def _left(self, file: FileRange, taken_over: pa.Array) -> Iterator[pa.RecordBatch]:
        for found in rows_of(file.path):
            batch = found if found.schema.equals(EVENT) else with_all_columns(found, EVENT).cast(EVENT)
            gone, left_behind = self._marked(batch)
            # A record that has another key now stays, without what it was before. One that came from another key
            # must not come back under it: it is told that it left, and nothing else. Where another record has that
            # key by then, even this would be the end of the other record.
            came = _came(batch, gone, left_behind)
            came = pc.and_not(came, pc.is_in(batch.column("event_id"), value_set=taken_over))
            if pc.any(came).as_py():
                batch = _set(batch, "key", came, batch.column("previous_key"))
                batch = _set(batch, "op", came, pa.scalar(str(Op.DELETE), pa.string()))
                for name in ("payload", "bytes"):
                    batch = _set(batch, name, came, None)
                gone = pc.and_not(gone, came)
            for name in ("previous_key", "before"):
                batch = _set(batch, name, pc.or_(left_behind, came), None)
            if (some := batch.filter(pc.invert(gone))).num_rows:
                yield some

    def _taken_over(self, file: FileRange, files: Sequence[FileRange]) -> pa.Array:
        """The ids of events of the file by which a record left a key for one of these, when another record had taken
        that key before: a key may be had twice until the transaction ends (a deferrable constraint).
        """

        def came(rows: pa.RecordBatch) -> pa.Array:
            return pc.and_(_came(rows, *self._marked(rows)), pc.is_valid(rows.column("tx")))

        moves = list(_found(file, came, "before"))
        found: list[dict[str, Any]] = []
        if moves:
            keys = pa.array({move["previous_key"] for move in moves}, pa.string())
            transactions = pa.array({move["tx"] for move in moves}, pa.string())
            for other in files:
                if other.batch_min <= file.batch_max and other.partition_min <= file.partition_max:
                    found += self._marks(other, keys, transactions)
        found.sort(key=_place)
        ids = [move["event_id"] for move in moves if _is_taken_over(move, found)]
        return pa.array(ids, pa.string())

    def _marks(self, file: FileRange, keys: pa.Array, transactions: pa.Array) -> Iterator[dict[str, Any]]:
        """The events of the stream in these transactions by which a record took one of the keys, or left it."""

        def are_marks(rows: pa.RecordBatch) -> pa.Array:
            of_key = pc.or_(*(pc.is_in(rows.column(name), value_set=keys) for name in ("key", "previous_key")))
            mine = pc.and_(pc.equal(rows.column("stream"), self.stream), of_key)
            return pc.and_(mine, pc.is_in(rows.column("tx"), value_set=transactions))

        return _found(file, are_marks, "op", "payload")

    def _marked(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        """Which events have one of the keys, and which had one before."""
        keys = pa.array(sorted(self.keys), pa.string())
        mine = pc.equal(batch.column("stream"), self.stream)
        has = pc.and_(mine, pc.is_in(batch.column("key"), value_set=keys))
        if "previous_key" not in batch.schema.names:  # of a file from before there was such a column
            return has, pa.repeat(False, len(has))
        return has, pc.and_(mine, pc.is_in(batch.column("previous_key"), value_set=keys))


def _found(file: FileRange, wanted: Callable[[pa.RecordBatch], pa.Array], *more: str) -> Iterator[dict[str, Any]]:
    """The events that are wanted, with these columns beside. Few files have one, and images are large: they are read
    only where there is one.
    """
    if any(pc.any(wanted(rows)).as_py() for rows in _all_rows_of(file, _TOLD_APART)):
        for rows in _all_rows_of(file, [*_TOLD_APART, *more]):
            yield from rows.filter(wanted(rows)).to_pylist()


def _all_rows_of(file: FileRange, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """These columns of the file, null where it was written before there was such a column."""
    schema = pa.schema([EVENT.field(name) for name in columns])
    for rows in rows_of(file.path, columns):
        yield with_all_columns(rows, schema).cast(schema)


def _came(batch: pa.RecordBatch, gone: pa.Array, left_behind: pa.Array) -> pa.Array:
    """Which events gave a record one of the keys, and took away one that is not to be forgotten."""
    return pc.and_(gone, pc.and_(pc.is_valid(batch.column("previous_key")), pc.invert(left_behind)))


def _place(event: dict[str, Any]) -> tuple[int, int, str]:
    return event["partition"], event["batch"], event["position"]


def _is_taken_over(move: dict[str, Any], marks: Sequence[dict[str, Any]]) -> bool:
    """Whether another record has the key that was left. `marks`: in the order of the log."""
    key = move["previous_key"]
    older = [
        mark
        for mark in marks
        if mark["partition"] == move["partition"]
        and mark["tx"] == move["tx"]
        and _place(mark) < _place(move)
        and key in (mark["key"], mark["previous_key"])
    ]
    if not older or older[-1]["op"] == Op.DELETE or older[-1]["previous_key"] == key:
        return False
    there, was = older[-1]["payload"], move["before"]
    if there is None or was is None or there == was:
        return False
    # The image before may be of the key's columns alone; where it is one record, all of them are the same in both.
    image, former = members(there), members(was)
    return not image or not former or any(image[name] != value for name, value in former.items() if name in image)


def _set(batch: pa.RecordBatch, name: str, where: pa.Array, value: pa.Array | pa.Scalar | None) -> pa.RecordBatch:
    at, field = batch.schema.get_field_index(name), EVENT.field(name)
    new = pa.scalar(None, field.type) if value is None else value
    return batch.set_column(at, field, pc.if_else(where, new, batch.column(at)))
