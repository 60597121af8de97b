"""Sources of a user's own, for tests of what the product does around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa

import evermark as em
from evermark.errors import GapError
from evermark.event import taken_batch
from evermark.testing.until import until

_PATIENCE_S = 120.0


class Numbers(em.Source):
    """Its events are numbered; the file `count` says how many there are."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def partitions(self) -> Sequence[int]:
        return [0]

    def earliest(self, partition: int) -> str:
        return f"{0:06d}"

    def latest(self, after: Mapping[int, str], limit: em.Limit) -> dict[int, str]:
        return {0: f"{int((self.folder / 'count').read_text()):06d}"}

    def slices(self, partition: int, start: str, end: str) -> Sequence[em.Slice]:
        return [em.Slice(partition, start, end)] if start < end else []

    def read(self, piece: em.Slice) -> Iterator[pa.RecordBatch]:
        numbers = list(range(int(piece.start), int(piece.end)))
        columns: dict[str, object] = {
            "event_id": [f"n-{n}" for n in numbers],
            "position": [f"{n:06d}" for n in numbers],
            "stream": ["numbers"] * len(numbers),
            "op": ["insert"] * len(numbers),
        }
        yield taken_batch(columns, len(numbers))


class Quitting(Numbers):
    """Ends the thread it is called in, once: as `sys.exit()` in a library does."""

    def begin(self, partition: int, position: str) -> None:
        quitted = self.folder / "quitted"
        if not quitted.exists():
            quitted.touch()
            raise SystemExit


class Lasting(Numbers):
    """Reading takes until the file `go_on` is there. The file `reads` has a line for each time it was begun."""

    def read(self, piece: em.Slice) -> Iterator[pa.RecordBatch]:
        with (self.folder / "reads").open("a") as reads:
            reads.write(f"{piece.start} {piece.end}\n")
        until((self.folder / "go_on").exists, "the test says go on", timeout_s=_PATIENCE_S)
        yield from super().read(piece)


class Mending(Numbers):
    """Has a gap when it is first read, which is closed when the file `go_on` is there. The file `repairs` has a line
    for each time that a repair was begun."""

    def check(self, positions: Mapping[int, str], newest: object) -> None:
        if not (self.folder / "mended").exists():
            raise GapError("what comes next is not to be had")

    def repair(self, partition: int) -> _Mend:
        return _Mend(self.folder)


@dataclass(frozen=True)
class _Nothing:
    """The events between the log and where reading goes on: there are none."""

    position: str
    pieces: Sequence[em.Slice] = ()
    since: datetime | None = None
    is_state: bool = False


@dataclass(frozen=True)
class _Mend:
    folder: Path

    def begin(self, stopped: Callable[[], bool], left_at: str | None = None, *_: object) -> _Nothing:
        with (self.folder / "repairs").open("a") as repairs:
            repairs.write("begun\n")
        gone_on = (self.folder / "go_on").exists
        until(lambda: gone_on() or stopped(), "the test says go on", timeout_s=_PATIENCE_S)
        if not gone_on():
            raise InterruptedError("the repair was cut off")
        return _Nothing(f"{0:06d}")

    def finish(self, position: str) -> None:
        (self.folder / "mended").touch()

    def abandon(self) -> None: ...

    def close(self) -> None: ...
