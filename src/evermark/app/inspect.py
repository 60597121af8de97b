"""A deployment looked at from outside: how each partition of a source stands. Looking makes and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from evermark.app.build import open_state
from evermark.checkpoints.base import Checkpoint
from evermark.config import Config
from evermark.errors import EvermarkError, FormatError, GapError, NotFoundError
from evermark.event import Seen
from evermark.ingest.repair.base import Recovery, Step, exhausted, may_open
from evermark.ingest.repair.postgres import Recoveries
from evermark.log.head import Head
from evermark.log.opened import gone, require_whole
from evermark.log.read import LogReader
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.base import Source
from evermark.state.connection import State
from evermark.state.migrate import require_current
from evermark.storage import Place

UNDER_WAY = (Step.OPENED, Step.CLOSED)
_LOOKS_MAX = 10


@dataclass(frozen=True)
class PartitionStatus:
    """One partition. `trouble` is why it cannot be read on from its checkpoint, or without one from its head."""

    partition: int
    checkpoint: Checkpoint | None
    trouble: EvermarkError | None
    repairable: bool
    past: tuple[Recovery, ...]  # recoveries, the newest first, the current included
    head: Head | None = None

    @property
    def position(self) -> str | None:
        """Where reading goes on; None: it has never begun."""
        return _position(self.checkpoint, self.head)

    @property
    def current(self) -> Recovery | None:
        return next((r for r in self.past if r.step in UNDER_WAY), None)

    def needs_person(self, now: datetime) -> bool:
        """Whether neither waiting nor starting an instance helps."""
        if self.trouble is None or self.current is not None:
            return False
        return not (self.repairable and may_open(self.trouble)) or exhausted(self.past, now)


def statuses(
    source: Source,
    name: str,
    checkpoints: Callable[[], Mapping[int, Checkpoint]],
    heads: Callable[[], Mapping[int, Head]],
    recoveries: Recoveries,
    log_folder: Place,
) -> list[PartitionStatus]:
    """`checkpoints` and `heads` are asked again while an instance reads the source: it must be of one moment."""
    past = recoveries.past(name)
    partitions = list(source.partitions())
    log = LogReader(log_folder)
    found: list[PartitionStatus] = []
    for partition in partitions:
        seen, unread = _newest(log, partition, past)
        checkpoint, head, trouble = _trouble(source, partition, checkpoints, heads, seen)
        if trouble is None:
            taken = max(each.batch if each is not None else 0 for each in (checkpoint, head))
            trouble = _set_back(log, partition, taken, f"{name}/{partition}") or unread
        mine = tuple(r for r in past if r.partition == partition)
        found.append(PartitionStatus(partition, checkpoint, trouble, source.repair(partition) is not None, mine, head))
    return found


def _newest(log: LogReader, partition: int, past: Sequence[Recovery]) -> tuple[Seen | None, EvermarkError | None]:
    """Its last event; or why the file that holds it cannot be read, which an owner that begins would meet, too."""
    try:
        return newest(log, [partition], past).get(partition), None
    except FormatError as error:
        return None, error


def newest(log: LogReader, partitions: Sequence[int], past: Sequence[Recovery]) -> dict[int, Seen]:
    """The last event of each partition, unless a person has since said that this place is the right one."""
    found: dict[int, Seen] = {}
    for partition in partitions:
        try:
            seen = log.newest(partition)
        except NotFoundError:
            return {}
        except EvermarkError as error:
            error.partition = partition  # the others are read on
            raise
        said = [r.changed_at for r in past if r.by_person and r.step is Step.DONE and r.partition == partition]
        if seen is not None and not any(seen.at < when for when in said):
            found[partition] = seen
    return found


def _position(checkpoint: Checkpoint | None, head: Head | None) -> str | None:
    if checkpoint is not None:
        return checkpoint.position
    return (head.passed_to or head.position) if head is not None else None  # as an owner would (`ingest.resume`)


def _trouble(
    source: Source,
    partition: int,
    checkpoints: Callable[[], Mapping[int, Checkpoint]],
    heads: Callable[[], Mapping[int, Head]],
    seen: Seen | None,
) -> tuple[Checkpoint | None, Head | None, EvermarkError | None]:
    """A partition's checkpoint and head, and why it cannot be read on from there."""
    checkpoint: Checkpoint | None = None
    head: Head | None = None

    def load() -> dict[int, str]:
        nonlocal checkpoint, head
        checkpoint, head = checkpoints().get(partition), heads().get(partition)
        position = _position(checkpoint, head)
        return {partition: position} if position is not None else {}

    try:
        check_at(source, load, {partition: seen} if seen is not None else {})
    except EvermarkError as error:
        # Without a checkpoint all partitions are checked: only our own error counts.
        return checkpoint, head, error if error.partition in (None, partition) else None
    return checkpoint, head, None


def _set_back(log: LogReader, partition: int, taken: int, where: str) -> EvermarkError | None:
    """Why an owner would refuse this log. A batch is in the log before its checkpoint is saved: so the log is looked at
    after the checkpoint was."""
    try:
        require_whole(log.tail_batch(partition), taken, where)
    except NotFoundError:
        return gone(log.folder, f"batch {taken} was in it") if taken else None
    except FormatError as error:
        return error
    return None


def check_at(source: Source, load: Callable[[], dict[int, str]], newest: Mapping[int, Seen] | None = None) -> None:
    """`Source.check` against the positions of checkpoints, though an instance may be reading.

    The instance saves its checkpoint first and then moves the source: a source past its checkpoint was moved by another
    program only if the checkpoint stays the same. If the checkpoint moves at every look, the source is being read.
    """
    resume = load()
    for _ in range(_LOOKS_MAX):
        try:
            source.check(resume, newest)
        except GapError:
            before, resume = resume, load()
            if resume == before:
                raise
        else:
            return


def may_have_state(config: Config) -> bool:
    """Whether anything may ever have been started here: without State there is no lease to ask for."""
    return config.state.dsn is not None or (config.data / "state").exists()


@contextmanager
def existing_state(config: Config) -> Iterator[State | None]:
    """State, if there is one of this program's version; None when nothing was ever started here. Makes none."""
    if not may_have_state(config):
        yield None
        return
    embedded, state = open_state(config)
    try:
        with state.connection() as conn:
            empty = conn.execute("select to_regclass(%s)", (f"{state.schema}.migrations",)).fetchone() == (None,)
        if not empty:
            require_current(state)
        yield None if empty else state
    finally:
        state.close()
        if embedded is not None:
            embedded.stop()


def judged(status: PartitionStatus, owner: str | None, now: datetime | None = None) -> list[Finding]:
    """The findings on the status of a partition. Pure."""
    found: list[Finding] = []
    name = f"partition {status.partition}"
    if status.checkpoint is None and status.head is None:
        found.append(ok("resume", f"{name} has no checkpoint yet: `evermark up` makes it"))
    trouble, current = status.trouble, status.current
    if trouble is not None:
        by_itself = not status.needs_person(now or datetime.now(UTC))
        mend = "`evermark up` repairs it by itself; see `evermark source recover`" if by_itself else trouble.hint
        found.append(wrong("resume", trouble.message, mend or "evermark source recover"))
    elif status.checkpoint is not None:
        found.append(ok("resume", f"{name} can be read on from its checkpoint, batch {status.checkpoint.batch}"))
    elif status.head is not None:
        taken = status.head.batch
        there = f"where the log ends, batch {taken}" if taken else "where it began"
        found.append(ok("resume", f"{name} has no checkpoint, and can be read on from {there}"))
    if current is not None:
        who = "the running instance is at it" if owner else "evermark up"
        said = f"{name}: {current.choice} is under way ({current.step}, {current.tries} tries), since {current.reason}"
        found.append(warning("recovery", f"{said}: {current.error}" if current.error else said, who))
    elif status.past:
        last = status.past[0]
        said = f"{name}: the last {last.choice} ended {last.step} at {last.changed_at:%Y-%m-%d %H:%M:%S}"
        found.append(ok("recovery", f"{said}, {last.taken} events taken, because {last.reason}"))
    return found
