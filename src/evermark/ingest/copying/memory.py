"""Copies in this process: for tests. Shipped, and held to the same contract as those in State."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime

from evermark.cluster.fence import source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.errors import BusyError
from evermark.sources.copies import (
    CANCELLED,
    TEXT_MAX,
    AskedBy,
    Bounds,
    ChoosePlace,
    Chunk,
    ChunkState,
    Copy,
    CopyState,
    Mark,
    no_such_copy,
    refuse_cancel,
)

_UNDER_WAY = (CopyState.PLANNED, CopyState.RUNNING)


class MemoryCopies:
    """A `CopyStore`, fenced by `leases`."""

    def __init__(self, leases: MemoryLeases, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._leases, self._clock = leases, clock
        self._kept: dict[str, Copy] = {}
        self._chunks: dict[tuple[str, int], Chunk] = {}
        self._horizons: dict[str, str] = {}
        self._listening: list[queue.SimpleQueue[str]] = []
        self._lock = threading.RLock()

    def request(self, source: str, stream: str, condition: str) -> Copy:
        with self._lock:
            for copy in self._kept.values():
                same = (copy.source, copy.stream, copy.condition) == (source, stream, condition)
                if same and copy.state in _UNDER_WAY:
                    return self._now(copy)
            made = self._make(source, stream, condition, AskedBy.PERSON)
            for each in self._listening:
                each.put(source)
            return made

    @contextmanager
    def requests(self) -> Iterator[Callable[[float], Collection[str]]]:
        said: queue.SimpleQueue[str] = queue.SimpleQueue()

        def heard(wait_s: float) -> Collection[str]:
            try:
                return {said.get(timeout=wait_s)}
            except queue.Empty:
                return ()

        self._listening.append(said)
        try:
            yield heard
        finally:
            self._listening.remove(said)

    def cancel(self, copy: str) -> Copy:
        with self._lock:
            if copy not in self._kept:
                raise no_such_copy(copy)
            refuse_cancel(self._kept[copy])
            if self._kept[copy].state in _UNDER_WAY:
                self._keep(self._kept[copy], state=CopyState.FAILED, error=CANCELLED)
            return self._now(self._kept[copy])

    def want(self, source: str, streams: Sequence[str], epoch: int) -> None:
        with self._lock:
            self._leases.fence(source_lease(source), epoch)
            mine = [c for c in self._kept.values() if c.source == source and c.asked_by is AskedBy.START]
            known = {copy.stream: copy for copy in mine}
            for stream in streams:
                if stream not in known:
                    self._make(source, stream, "", AskedBy.START)
                elif known[stream].state is CopyState.FAILED:
                    state = CopyState.RUNNING if known[stream].chunks else CopyState.PLANNED
                    self._keep(known[stream], state=state, tries=0, error="")

    def listed(self, source: str | None = None) -> list[Copy]:
        with self._lock:
            return [self._now(copy) for copy in reversed(self._kept.values()) if source in (None, copy.source)]

    def plan(self, copy: str, bounds: Sequence[Bounds], epoch: int) -> None:
        with self._fenced(copy, epoch):
            if self._kept[copy].state is CopyState.PLANNED:
                self._keep(self._kept[copy], state=CopyState.RUNNING, chunks=len(bounds))
                for number, each in enumerate(bounds):
                    self._chunks[copy, number] = Chunk(copy, number, each, ChunkState.OPEN, 0, "", "", 0, None)
                self._finish(copy)

    def chunks(self, copy: str, states: Sequence[ChunkState], limit: int | None = None) -> list[Chunk]:
        with self._lock:
            return [c for (of, _), c in sorted(self._chunks.items()) if of == copy and c.state in states][:limit]

    def begin(self, copy: str, number: int, epoch: int) -> int:
        with self._fenced(copy, epoch):
            chunk = self._chunks.get((copy, number))
            if chunk is None or chunk.state not in (ChunkState.OPEN, ChunkState.WRITING):
                raise BusyError(f"chunk {number} of copy {copy} is written already", hint="it is left as it is")
            attempt = chunk.attempt + 1
            cleared = Chunk(copy, number, chunk.bounds, ChunkState.WRITING, attempt, "", "", 0, None, chunk.told)
            self._chunks[copy, number] = cleared
            return attempt

    def ready(self, mark: Mark, position: str, rows: int, epoch: int) -> bool:
        with self._fenced(mark.copy, epoch):
            chunk = self._writing(mark)
            if chunk is None:
                return False
            self._chunks[mark.copy, mark.number] = replace(
                chunk, state=ChunkState.READY, position=position, file=mark.file, rows=rows, ready_at=self._clock()
            )
            return True

    def chunk(self, copy: str, number: int) -> Chunk | None:
        with self._lock:
            return self._chunks.get((copy, number))

    def give_up(self, mark: Mark) -> None:
        with self._lock:
            chunk = self._writing(mark)
            if chunk is not None:
                self._chunks[mark.copy, mark.number] = replace(chunk, state=ChunkState.OPEN)

    def give_up_all(self, source: str, epoch: int) -> None:
        with self._lock:
            self._leases.fence(source_lease(source), epoch)
            for place, chunk in self._chunks.items():
                if chunk.state is ChunkState.WRITING and self._kept[chunk.copy].source == source:
                    self._chunks[place] = replace(chunk, state=ChunkState.OPEN)

    def reach(self, source: str, position: str, epoch: int) -> None:
        with self._lock:
            self._leases.fence(source_lease(source), epoch)
            self._horizons[source] = max(self._horizons.get(source, position), position)

    def place(self, mark: Mark, choose: ChoosePlace, epoch: int) -> str | None:
        with self._fenced(mark.copy, epoch):
            chunk, source = self._writing(mark), self._kept[mark.copy].source
            if chunk is None:
                return None
            position, self._horizons[source] = choose(self._horizons.get(source))
            self._chunks[mark.copy, mark.number] = replace(chunk, position=position)
            return position

    def placed(self, source: str, since: str) -> list[Chunk]:
        with self._lock:
            found = [
                chunk
                for chunk in self._chunks.values()
                if chunk.state in (ChunkState.WRITING, ChunkState.READY)
                and self._kept[chunk.copy].source == source
                and chunk.position >= since
                and chunk.position
            ]
            return sorted(found, key=lambda chunk: chunk.position)

    def done(self, copy: str, numbers: Sequence[int], epoch: int) -> None:
        with self._fenced(copy, epoch):
            self._move(copy, numbers, ChunkState.DONE)
            self._finish(copy)

    def reopen(self, copy: str, number: int, epoch: int, told: Sequence[int] = ()) -> None:
        with self._fenced(copy, epoch):
            chunk = self._chunks[copy, number]
            if chunk.state is ChunkState.READY:
                known = tuple(sorted({*chunk.told, *told}))
                self._chunks[copy, number] = replace(chunk, state=ChunkState.OPEN, told=known)

    def trouble(self, copy: str, error: str, epoch: int, *, failed: bool = False, counts: bool = True) -> None:
        with self._fenced(copy, epoch):
            found = self._kept[copy]
            if found.state in _UNDER_WAY and (error or found.error):
                state, tries = CopyState.FAILED if failed else found.state, found.tries + counts if error else 0
                self._keep(found, state=state, tries=tries, error=error[:TEXT_MAX])

    def close(self) -> None: ...

    def _fenced(self, copy: str, epoch: int) -> threading.RLock:
        with self._lock:
            if copy not in self._kept:
                raise no_such_copy(copy)
            self._leases.fence(source_lease(self._kept[copy].source), epoch)
            return self._lock

    def _writing(self, mark: Mark) -> Chunk | None:
        chunk = self._chunks.get((mark.copy, mark.number))
        return chunk if chunk and chunk.state is ChunkState.WRITING and chunk.attempt == mark.attempt else None

    def _make(self, source: str, stream: str, condition: str, by: AskedBy) -> Copy:
        number, now = f"{len(self._kept) + 1:016x}", self._clock()
        made = Copy(number, source, stream, condition, by, CopyState.PLANNED, 0, 0, 0, 0, "", now, now)
        self._kept[number] = made
        return made

    def _keep(self, copy: Copy, **changed: object) -> None:
        self._kept[copy.id] = replace(copy, changed_at=self._clock(), **changed)  # type: ignore[arg-type]

    def _move(self, copy: str, numbers: Sequence[int], state: ChunkState) -> None:
        for number in numbers:
            chunk = self._chunks.get((copy, number))
            if chunk is not None and chunk.state is ChunkState.READY:
                self._chunks[copy, number] = replace(chunk, state=state)

    def _finish(self, copy: str) -> None:
        mine = [chunk for (of, _), chunk in self._chunks.items() if of == copy]
        if self._kept[copy].state is CopyState.RUNNING and all(c.state is ChunkState.DONE for c in mine):
            self._keep(self._kept[copy], state=CopyState.DONE, error="", rows=sum(c.rows for c in mine))
            for chunk in mine:
                del self._chunks[copy, chunk.number]

    def _now(self, copy: Copy) -> Copy:
        mine = [chunk for (of, _), chunk in self._chunks.items() if of == copy.id]
        rows = sum(chunk.rows for chunk in mine if chunk.state is ChunkState.DONE)
        left = sum(chunk.state is not ChunkState.DONE for chunk in mine)
        return replace(copy, rows=copy.rows + rows, chunks_left=left)
