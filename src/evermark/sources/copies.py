"""Rows that were there before a stream began, brought beside it as `op = read`: what is kept of a copy, and the ports.

A copy is cut into chunks by key. A chunk is written to a file by a task, and a **mark** is put into the stream: there,
and nowhere else, its rows stand. The reader of the stream asks at the mark what became of that attempt. The answer
never changes once it was given, so reading stays repeatable. Where a stream takes no marks, State decides the position
of an attempt, once (`CopyStore.place`): always behind the **horizon**, which is as far as reading may have come.

| chunk is | set by | leaves by |
|---|---|---|
| `open` | planning; an attempt that was given up; a mark that was lost with the slot | a task begins an attempt |
| `writing` | a task, before its mark | its file is whole (`ready`); a reader or new owner gives it up (`open`) |
| `ready` | the task, once its file is durable | the checkpoint passes its mark (`done`); the mark was lost (`open`) |
| `done` | the source's owner | |

A mark of any attempt but the chunk's present one is void: nothing stands there.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import ConflictError, NotFoundError
from evermark.storage import Place

TEXT_MAX = 2000
CANCELLED = "cancelled"
_MARK = re.compile(r"copy/([0-9a-f]{16})/([0-9]{1,9})/([0-9]{1,9})", re.ASCII)
_PLAIN_KEY_BYTES_MAX = 40
_PLAIN_KEY = f"[0-9A-Za-z_-]{{1,{_PLAIN_KEY_BYTES_MAX}}}"
KeyText = tuple[str, ...]  # of one key: the text of each of its columns
Bounds = tuple[KeyText | None, KeyText | None]  # behind the first, up to the second itself; None: no bound there
# Of the horizon (None: there is none): the position of a chunk behind it, and the horizon from then on.
ChoosePlace = Callable[[str | None], tuple[str, str]]
# A task that has its place, or its mark, is ready in a moment. If it takes longer it has most likely died.
WAIT_S = 10.0
CHUNK_ROWS_MAX = 100_000
CHUNK_ROWS_MIN = 100
CHUNK_BYTES = 32 * 1024 * 1024


class CopyState(StrEnum):
    PLANNED = "planned"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class ChunkState(StrEnum):
    OPEN = "open"
    WRITING = "writing"
    READY = "ready"
    DONE = "done"


class AskedBy(StrEnum):
    START = "start"  # `start: copy` in the file
    PERSON = "person"


@dataclass(frozen=True)
class Copy:
    """`rows` and `chunks_left` are as of now, whatever its state."""

    id: str
    source: str
    stream: str
    condition: str
    asked_by: AskedBy
    state: CopyState
    chunks: int
    chunks_left: int
    rows: int
    tries: int
    error: str
    made_at: datetime
    changed_at: datetime


@dataclass(frozen=True)
class Chunk:
    copy: str
    number: int
    bounds: Bounds
    state: ChunkState
    attempt: int
    position: str  # of the mark, of a chunk that is ready or done; of a place, from when it was given
    file: str
    rows: int
    ready_at: datetime | None
    told: tuple[int, ...] = ()  # partitions whose rows of it are in the log, though others were lost


@dataclass(frozen=True)
class ChunkWork:
    """A chunk for a task to write. Picklable."""

    copy: str
    number: int
    stream: str
    bounds: Bounds
    condition: str
    told: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mark:
    """What a mark in the stream says. Foreign ones, of another deployment at the same server, look the same."""

    copy: str
    number: int
    attempt: int

    def __str__(self) -> str:
        return f"copy/{self.copy}/{self.number}/{self.attempt}"

    @classmethod
    def parse(cls, text: str) -> Mark | None:
        """None for anything that we do not write ourselves: everybody with access to the database may send messages."""
        found = _MARK.fullmatch(text)
        return cls(found[1], int(found[2]), int(found[3])) if found is not None else None

    @property
    def file(self) -> str:
        return f"{self.copy}-{self.number}-{self.attempt}.rows"


class Fate(StrEnum):
    """What stands at a mark."""

    PENDING = "pending"  # not decided: the task may still be at work
    READY = "ready"
    VOID = "void"


def fate_of(chunk: Chunk | None, attempt: int) -> Fate:
    """`chunk`: as it is now; None: it is no chunk of ours, or its copy is over."""
    if chunk is None or chunk.attempt != attempt:
        return Fate.VOID
    if chunk.state is ChunkState.WRITING:
        return Fate.PENDING
    return Fate.READY if chunk.state is ChunkState.READY else Fate.VOID


def rows_of_chunk(size: int, rows: int, most: int = CHUNK_ROWS_MAX) -> int:
    """So many rows of a table that has this size, large values included. Pure; the number of rows is an estimate."""
    return max(CHUNK_ROWS_MIN, min(most, CHUNK_BYTES * rows // max(1, size))) if rows else most


def refuse_cancel(copy: Copy) -> None:
    if copy.asked_by is AskedBy.START:
        raise ConflictError(
            f"copy {copy.id} of {copy.stream} is asked for by the file",
            hint="take `start: copy` out of it, or the table, and start `evermark up` again",
        )


def no_such_copy(copy: str) -> NotFoundError:
    return NotFoundError(f"there is no copy {copy}", hint="`evermark status` shows them")


def row_id(copy: str, stream: str, key: str) -> str:
    """Of a copied row: the same in every attempt, another in every copy, which is of one stream. Most keys are short
    and plain: they are the id themselves. Others are hashed: an id travels in headers.
    """
    if re.fullmatch(_PLAIN_KEY, key, re.ASCII):
        return f"{copy}.{key}"
    return hashlib.sha256(f"{copy}\n{stream}\n{key}".encode()).hexdigest()[:40]


def row_ids(copy: str, stream: str, keys: pa.Array) -> pa.Array:
    """`row_id` of many."""
    ids = pc.binary_join_element_wise(f"{copy}.", keys, "")
    short = pc.less_equal(pc.binary_length(keys), _PLAIN_KEY_BYTES_MAX)
    if pc.all(pc.and_(short, pc.ascii_is_alnum(keys))).as_py():  # numbers: quicker than by the expression
        return ids
    plain = pc.match_substring_regex(keys, rf"\A{_PLAIN_KEY}\z")
    if pc.all(plain).as_py():
        return ids
    odd = pc.invert(plain)
    hashed = [row_id(copy, stream, key) for key in keys.filter(odd).to_pylist()]
    return pc.replace_with_mask(ids, odd, pa.array(hashed, pa.string()))


class CopyStore(Protocol):
    """Copies of one deployment. What an owner writes takes the epoch of the source's lease, and is refused with
    `StaleError` when it is old. What a reader or a person writes is not fenced, and says so.
    """

    def request(self, source: str, stream: str, condition: str) -> Copy:
        """A person asks for a copy; not fenced. Asked again while the same is under way, it is that one."""

    def requests(self) -> AbstractContextManager[Callable[[float], Collection[str]]]:
        """Listen for requests of persons. What it gives waits for requests, at most so many seconds, and says of which
        sources they are: from here on, and as well as can be. A caller that must not miss one has to look, too."""

    def cancel(self, copy: str) -> Copy:
        """A person wants no more of a copy that a person asked for; not fenced. What is ready is still told. One that
        is over stays as it is. Raises `ConflictError` if the file asks for it, `NotFoundError` if there is none.
        """

    def want(self, source: str, streams: Sequence[str], epoch: int) -> None:
        """The file asks for copies: a stream that never had one for that reason gets one; a failed one begins anew."""

    def listed(self, source: str | None = None) -> list[Copy]:
        """The newest first."""

    def plan(self, copy: str, bounds: Sequence[Bounds], epoch: int) -> None:
        """Its chunks. Once planned, it stays as it is."""

    def chunks(self, copy: str, states: Sequence[ChunkState], limit: int | None = None) -> list[Chunk]:
        """By number."""

    def begin(self, copy: str, number: int, epoch: int) -> int:
        """A new attempt; all before it are void. Raises `BusyError` if the chunk is ready or done."""

    def ready(self, mark: Mark, position: str, rows: int, epoch: int) -> bool:
        """Its file is durable, and the mark at `position`. False: the attempt was given up meanwhile."""

    def chunk(self, copy: str, number: int) -> Chunk | None: ...

    def give_up(self, mark: Mark) -> None:
        """By a reader that waits no longer; not fenced: whether `ready` came first is decided here."""

    def give_up_all(self, source: str, epoch: int) -> None:
        """By a new owner: what tasks of the owner before are writing is void."""

    def reach(self, source: str, position: str, epoch: int) -> None:
        """Reading is about to go as far as `position`: no attempt is placed before it from now on."""

    def place(self, mark: Mark, choose: ChoosePlace, epoch: int) -> str | None:
        """Where the chunk stands: `choose` says it of the horizon, which nobody moves meanwhile. None: the attempt was
        given up."""

    def placed(self, source: str, since: str) -> list[Chunk]:
        """Chunks that are ready, or being written and placed, from this position on, in the order of positions."""

    def done(self, copy: str, numbers: Sequence[int], epoch: int) -> None:
        """Of chunks that are ready. A copy whose last chunk is done is done."""

    def reopen(self, copy: str, number: int, epoch: int, told: Sequence[int] = ()) -> None:
        """Of a chunk that is ready, whose mark was lost: but for these partitions, which have its rows."""

    def trouble(self, copy: str, error: str, epoch: int, *, failed: bool = False, counts: bool = True) -> None:
        """An error, counted as a try of the copy if it `counts`; empty: all is well again. `failed`: it is not tried
        any more."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class CopyPlace:
    """Where the copies of a source are kept. Picklable: `open` opens what State has of them."""

    open: Callable[[], CopyStore]
    folder: Place
    source: str = ""  # what the file calls it
    all_wanted: bool = False  # the file says `start: copy`
    chunk_rows_max: int = CHUNK_ROWS_MAX


class Copying(Protocol):
    """How a source copies the rows of its streams. Picklable: `write` runs in tasks."""

    folder: Place  # of the files; readers of the log can read it, too

    @property
    def streams(self) -> Sequence[str]:
        """The streams that the file names."""

    @property
    def wanted(self) -> Sequence[str]:
        """The streams that the file wants copied."""

    @property
    def partitions(self) -> Sequence[int]:
        """The partitions that the rows of a chunk may be in."""
        return (0,)

    def reads(self, stream: str) -> bool:
        """Whether the file wants the changes of this stream: only then its rows can be copied."""
        return stream in self.streams

    def stream(self, text: str) -> str:
        """The stream that a person typed. Raises `ValueError` with what is wrong with it."""

    def condition(self, text: str) -> str:
        """The condition that a person typed, as it is kept. Raises `ValueError` with what is wrong with it."""
        return text

    def plan(self, stream: str) -> list[Bounds]:
        """The whole stream, cut by key."""

    def watch(self, epoch: int | None) -> bool:
        """By the owner, beside the reading, before a chunk is begun: from now on copies are under way, or, with None,
        there are none. False: chunks cannot be placed yet, because reading has not begun everywhere."""
        return True

    def write(self, works: Sequence[ChunkWork], epoch: int, until_s: float) -> Iterator[ChunkWork]:
        """Write chunks one after another. Yields each before it is begun: what is raised after that is its error. No
        other is begun later than `until_s` seconds from now."""

    def compare(self, position: str, checkpoint: str) -> bool | None:
        """Whether reading that stands at `checkpoint` has passed the mark at `position`; None: they are of two
        histories of the place, and nobody can say."""

    def firsts(self, chunk: Chunk) -> Mapping[int, str]:
        """Of a chunk that is ready: the position of its first row in each partition that has one."""
        return {0: chunk.position} if chunk.rows else {}
