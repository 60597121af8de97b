"""The pgoutput protocol (version 1), a whole chunk of messages at a time.

A chunk is the concatenated messages and their lengths. Nothing loops over rows: the kind byte, the LSN, the relation
and each column are gathered for all messages at once with numpy. State that outlives a chunk (the open transaction,
how many changes it had, the relations seen) is kept in `PgoutputReader`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from evermark.errors import FormatError
from evermark.sources.postgres.lsn import U8, Position, WalPages

I64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

_BEGIN, _COMMIT, _RELATION = b"BCR"
INSERT, UPDATE, DELETE, TRUNCATE, MESSAGE = b"IUDTM"
_BEGIN_BYTES = 21
_TRUNCATE_HEADER = 6
_MESSAGE_HEADER = 14  # without its prefix and content
# A logical message in the WAL: the header of its record, and of the message in it.
_RECORD_BYTES, _MESSAGE_BYTES = 24, 24
_SHORT_DATA = 255
# A message is placed at most so far behind the beginning of its record: what a session may add to it (its replication
# origin, the transaction above it), and a page's header.
MESSAGE_LATE_MAX = 64
NO_TIME = np.iinfo(np.int64).min
# Not changes, and not counted: how often relations and types are sent depends on the session, not on the WAL.
_QUIET = np.zeros(256, dtype=np.bool_)
_QUIET[list(b"BCRYO")] = True
_HAS_RELATION = np.zeros(256, dtype=np.bool_)
_HAS_RELATION[list(b"IUDT")] = True

NULL, UNCHANGED, TEXT, BINARY = b"nutb"
_WORD = 8  # read at once where a value begins
COLUMNS_MAX = 1664


@dataclass(frozen=True)
class Relation:
    """A table as a Relation message describes it, from that message on until the next one for it."""

    oid: int
    schema: str
    name: str
    columns: tuple[str, ...]
    types: tuple[tuple[int, int], ...] = ()  # of each column: the type's number, and its modifier
    keys: tuple[bool, ...] = ()  # whether a column is part of the replica identity
    identity: str = "d"  # default, full, index or nothing, by its first letter
    shape: bytes = b""  # the message without the table's number: equal for equal tables

    @property
    def stream(self) -> str:
        return f"{self.schema}.{self.name}"


@dataclass(frozen=True)
class Cells:
    """One column of many rows: how each value is sent, and where its bytes are."""

    kind: U8
    start: I64
    length: I64
    whole: bool = False  # every row has a value


@dataclass(frozen=True)
class View:
    """A chunk's bytes, readable at any offset as numbers of the wire's byte order."""

    data: bytes
    u8: U8 = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "u8", np.frombuffer(self.data, dtype=np.uint8))

    def blocks(self, at: I64, size: int) -> U8:
        """`size` bytes from each of these offsets, as rows; they lie inside the chunk."""
        count = len(self.data) - size + 1
        if count <= 0 or not len(at):
            return np.zeros((len(at), size), dtype=np.uint8)
        strided = np.ndarray((count,), dtype=f"V{size}", buffer=self.data, strides=(1,))
        return strided[at].view(np.uint8).reshape(len(at), size)

    def numbers(self, at: I64, dtype: str) -> npt.NDArray[np.generic]:
        """Big-endian numbers at these offsets; the caller has made sure that they lie inside the chunk."""
        size = np.dtype(dtype).itemsize
        count = len(self.data) - size + 1
        if count <= 0:
            return np.zeros(len(at), dtype=np.dtype(dtype).newbyteorder("="))
        strided = np.ndarray((count,), dtype=dtype, buffer=self.data, strides=(1,))
        return strided[at].astype(np.dtype(dtype).newbyteorder("="))


@dataclass(frozen=True)
class Changes:
    """The changes of a chunk that fall in the range asked for, in order. Arrays are parallel."""

    view: View
    kind: U8
    start: I64
    end: I64
    lsn: npt.NDArray[np.uint64]
    ordinal: I64
    xid: npt.NDArray[np.uint32]
    time: I64  # of the commit, in microseconds since 2000; NO_TIME where there is no transaction
    relation: npt.NDArray[np.int32]  # index into `relations`; -1 when there is none
    relations: list[Relation]

    def between(self, first: int, last: int) -> Changes:
        """The changes from number `first` on, without number `last`."""
        if first == 0 and last == len(self.kind):
            return self
        some = slice(first, last)
        return Changes(
            self.view, self.kind[some], self.start[some], self.end[some], self.lsn[some], self.ordinal[some],
            self.xid[some], self.time[some], self.relation[some], self.relations,
        )  # fmt: skip


@dataclass(frozen=True)
class _Open:
    """The transaction under way."""

    lsn: int
    xid: int
    time: int
    changes: int  # of it, in chunks before


class PgoutputReader:
    """Feeds on chunks in the order the server sent them; gives back the changes in `[start, end)`.

    A transaction is taken by its Begin message's final LSN, which is its commit record's: never by the `lsn` column
    of a change, which is where the change was written. A logical message outside any transaction is taken by its own
    record's LSN: the server sends it between transactions, in the order of these two LSNs. (The message tells where its
    record *ends*, and there another may begin; a slot judges by where it begins. So it is placed there, or up to
    MESSAGE_LATE_MAX behind, if not all of the record's size is known: a slot is confirmed that much late.)

    Changes of a transaction are numbered from 0 on; `stride` leaves room between their ordinals. A truncate of several
    tables is a change of each. Logical messages of a transaction that is only partly in the range are given, too.
    """

    def __init__(
        self,
        start: Position,
        end: Position,
        *,
        stride: int = 1,
        pages: WalPages = WalPages(),  # noqa: B008 - a value
        encoding: str = "utf-8",
    ) -> None:
        self._encoding = encoding
        self._start, self._end, self._stride, self._pages = start, end, stride, pages
        self._open: _Open | None = None
        self._relations: dict[int, Relation] = {}

    def feed(self, lengths: I64, data: bytes, skip: int = 0) -> Changes:
        """`skip`: so many bytes in front of each message are none of it."""
        view = View(data)
        starts, ends = _frame(lengths, data, skip)
        begins = view.u8[starts] == _BEGIN
        if np.any((ends - starts)[begins] != _BEGIN_BYTES):
            raise FormatError("a Begin message of pgoutput has an unknown shape", hint="is the plugin pgoutput?")
        starts, ends, table = _each_truncated(view, starts, ends)
        kind = view.u8[starts]
        change = ~_QUIET[kind]
        alone = _outside(view, kind, starts, ends)
        counts = change & ~alone
        transaction = np.cumsum(kind == _BEGIN)
        if self._open is None and bool(np.any(counts & (transaction == 0))):
            raise FormatError("pgoutput sent a change outside a transaction", hint="is the plugin pgoutput?")

        was = self._open or _Open(0, 0, 0, 0)
        at_begin = np.flatnonzero(kind == _BEGIN)
        at = starts[at_begin]
        lsns = np.concatenate([np.array([was.lsn], np.uint64), view.numbers(at + 1, ">u8").astype(np.uint64)])
        times = np.concatenate([np.array([was.time], np.int64), view.numbers(at + 9, ">i8").astype(np.int64)])
        xids = np.concatenate([np.array([was.xid], np.uint32), view.numbers(at + 17, ">u4").astype(np.uint32)])
        counted = np.cumsum(counts)
        before = np.concatenate([np.array([-was.changes], np.int64), counted[at_begin]])
        number, lsn, time = counted - 1 - before[transaction], lsns[transaction], times[transaction]
        if alone.any():
            lsn[alone] = self._message_lsns(view, starts[alone], ends[alone])
            number[alone], time[alone] = 0, NO_TIME
        ordinal = number * self._stride + self._stride - 1
        index, known = self._relate(view, kind, starts, ends, table)
        taken = np.flatnonzero(change & (self.in_range(lsn, ordinal) | ((kind == MESSAGE) & self._touched(lsn))))
        result = Changes(
            view, kind[taken], starts[taken], ends[taken], lsn[taken], ordinal[taken],
            xids[transaction[taken]], time[taken], index[taken], known,
        )  # fmt: skip
        if len(kind):
            last = _Open(int(lsns[-1]), int(xids[-1]), int(times[-1]), int(counted[-1] - before[-1]))
            self._carry(kind, at_begin, last)
        return result

    def _message_lsns(self, view: View, starts: I64, ends: I64) -> npt.NDArray[np.uint64]:
        data = _MESSAGE_BYTES + ends - starts - _MESSAGE_HEADER
        size = _RECORD_BYTES + np.where(data > _SHORT_DATA, 5, 2) + data
        return self._pages.before(view.numbers(starts + 2, ">u8").astype(np.uint64), (size + 7) // 8 * 8)

    def in_range(self, lsn: npt.NDArray[np.uint64], ordinal: I64) -> Mask:
        start, end = np.uint64(self._start.lsn), np.uint64(self._end.lsn)
        after = (lsn > start) | ((lsn == start) & (ordinal >= self._start.ordinal))
        before = (lsn < end) | ((lsn == end) & (ordinal < self._end.ordinal))
        found: Mask = after & before
        return found

    def _touched(self, lsn: npt.NDArray[np.uint64]) -> Mask:
        """Which transactions the range has anything of: a logical message may stand for events behind it."""
        start, end = np.uint64(self._start.lsn), np.uint64(self._end.lsn)
        found: Mask = (lsn >= start) & ((lsn <= end) if self._end.ordinal else (lsn < end))
        return found

    def _carry(self, kind: U8, begins: I64, last: _Open) -> None:
        commits = np.flatnonzero(kind == _COMMIT)
        last_begin = int(begins[-1]) if len(begins) else -1
        if len(commits) and int(commits[-1]) > last_begin:
            self._open = None
        elif last_begin >= 0 or self._open is not None:
            self._open = last

    def _relate(
        self, view: View, kind: U8, starts: I64, ends: I64, table: I64
    ) -> tuple[npt.NDArray[np.int32], list[Relation]]:
        """For each message which relation it is about, as that relation was when the message was sent."""
        index = np.full(len(kind), -1, dtype=np.int32)
        known: list[Relation] = []
        about = np.flatnonzero(_HAS_RELATION[kind] & (ends - starts >= 5))
        named_at = np.where(kind[about] == TRUNCATE, _TRUNCATE_HEADER + 4 * table[about], 1)
        oids = view.numbers(starts[about] + named_at, ">u4")
        at_relations = np.flatnonzero(kind == _RELATION).tolist()
        described = [(i, parse_relation(view.data[starts[i] : ends[i]], self._encoding)) for i in at_relations]
        for oid in np.unique(oids).tolist():
            rows = about[oids == oid]
            versions = [(-1, self._relations.get(oid)), *((i, r) for i, r in described if r.oid == oid)]
            which = np.searchsorted(np.array([i for i, _ in versions]), rows) - 1
            for number, (_, relation) in enumerate(versions):
                if relation is not None:
                    index[rows[which == number]] = len(known)
                    known.append(relation)
        self._relations.update((relation.oid, relation) for _, relation in described)
        return index, known


def _frame(lengths: I64, data: bytes, skip: int) -> tuple[I64, I64]:
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if total != len(data) or (len(lengths) and int(lengths.min()) <= skip):
        raise FormatError("a chunk of pgoutput does not have the length it says", hint="report this, with the log")
    return ends - lengths + skip, ends


def _each_truncated(view: View, starts: I64, ends: I64) -> tuple[I64, I64, I64]:
    """A truncate names all its tables in one message: repeated, once for each, with the number of the table in it."""
    truncates = np.flatnonzero(view.u8[starts] == TRUNCATE)
    if not len(truncates):
        return starts, ends, np.zeros(len(starts), np.int64)
    tables = np.ones(len(starts), np.int64)
    safe = ends[truncates] - starts[truncates] >= _TRUNCATE_HEADER
    counts = view.numbers(np.where(safe, starts[truncates] + 1, 0), ">u4").astype(np.int64)
    if not bool(np.all(safe & (ends[truncates] - starts[truncates] == _TRUNCATE_HEADER + 4 * counts))):
        raise FormatError("a Truncate message of pgoutput has an unknown shape", hint="report this, with the log")
    tables[truncates] = counts
    first = np.cumsum(tables) - tables
    number = np.arange(int(tables.sum())) - np.repeat(first, tables)
    return np.repeat(starts, tables), np.repeat(ends, tables), number


def _outside(view: View, kind: U8, starts: I64, ends: I64) -> Mask:
    """Which messages are logical messages that belong to no transaction."""
    messages: Mask = kind == MESSAGE
    if not messages.any():
        return messages
    if np.any(ends[messages] - starts[messages] < _MESSAGE_HEADER):
        raise FormatError("a Message of pgoutput has an unknown shape", hint="report this, with the log")
    found: Mask = messages & (view.u8[np.where(messages, starts + 1, 0)] & 1 == 0)
    return found


def parse_relation(message: bytes, encoding: str = "utf-8") -> Relation:
    """A Relation message. There are few of them: one per table, session and schema change. Names are in the server's
    encoding."""
    try:
        (oid,) = struct.unpack_from(">I", message, 1)
        schema, at = _cstring(message, 5, encoding)
        name, at = _cstring(message, at, encoding)
        identity, count = struct.unpack_from(">cH", message, at)
        at += 3
        columns, types, keys = [], [], []
        for _ in range(min(count, COLUMNS_MAX)):
            keys.append(bool(message[at] & 1))
            column, at = _cstring(message, at + 1, encoding)
            columns.append(column)
            types.append(struct.unpack_from(">Ii", message, at))
            at += 8
    except (struct.error, ValueError, IndexError) as error:
        raise FormatError("a Relation message of pgoutput cannot be read", hint="report this, with the log") from error
    return Relation(
        oid, schema or "pg_catalog", name, tuple(columns),
        tuple(types), tuple(keys), identity.decode("ascii", "replace"), bytes(message[5:]),
    )  # fmt: skip


def _cstring(message: bytes, at: int, encoding: str) -> tuple[str, int]:
    end = message.index(b"\0", at)
    return message[at:end].decode(encoding, "replace"), end + 1


def new_tuples(changes: Changes, rows: I64) -> tuple[I64, I64, Mask]:
    """Of inserts: where the tuple's columns begin, how many there are, and which messages have that shape at all."""
    return tuples(changes.view, changes.start[rows] + 5, changes.end[rows], b"N")


def tuples(view: View, at: I64, end: I64, marks: bytes) -> tuple[I64, I64, Mask]:
    """Of tuples that begin, each with one of these marks, at these places: where their columns begin, how many there
    are, and which of them have that shape at all."""
    long_enough = at + 3 <= end
    safe = np.where(long_enough, at, 0)
    shaped: Mask = long_enough & np.isin(view.u8[safe], list(marks))
    return safe + 3, view.numbers(safe + 1, ">u2").astype(np.int64), shaped


def walk(view: View, at: I64, end: I64, columns: int) -> Iterator[tuple[Cells, Mask]]:
    """Column by column over many tuples; with each, which tuples could be read so far.

    What runs over the end of its message is marked and parked at the message's end, so that one damaged row never
    reaches into the next.
    """
    last = len(view.data) - 1
    intact = np.ones(len(at), dtype=np.bool_)
    is_intact = True
    alike = {kind: np.full(len(at), kind, dtype=np.uint8) for kind in (TEXT, BINARY)}
    for _ in range(columns):
        if is_intact and (found := _all_lengths(view, at, end)) is not None:
            kind_of_all, length = found
            start = at + 5
            at = start + length
            yield Cells(alike[kind_of_all], start, length, whole=True), intact
            continue
        inside = at < end
        kind = view.u8[np.minimum(at, last)]
        valued = (kind == TEXT) | (kind == BINARY)
        intact &= inside & ((valued & (at + 5 <= end)) | (kind == NULL) | (kind == UNCHANGED))
        valued &= intact
        length = view.numbers(np.where(valued, at + 1, 0), ">i4").astype(np.int64)
        length[~valued] = 0
        start = at + np.where(valued, 5, 1)
        intact &= (length >= 0) & (start + length <= end)
        is_intact = bool(intact.all())
        if not is_intact:
            start = np.where(intact, start, end)
            length = np.where(intact, length, 0)
        at = start + length
        yield Cells(kind, start, length), intact


def _all_lengths(view: View, at: I64, end: I64) -> tuple[int, I64] | None:
    """Of the usual column, at half the cost: every row has a value that ends within its message, sent in one way."""
    if not len(at) or int(at.max()) + _WORD > len(view.data):
        return None
    words = view.blocks(at, _WORD)  # the kind, the length, and some of the value
    kind = int(words[0, 0])
    if kind not in (TEXT, BINARY) or not (words[:, 0] == kind).all():
        return None
    length = np.ndarray(len(at), dtype=">u4", buffer=words, offset=1, strides=(_WORD,)).astype(np.int64)
    return None if (at + 5 + length > end).any() else (kind, length)
