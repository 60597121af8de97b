"""For how long events have been waiting. Each source is asked for events that the log lacks, and the log for events not
delivered yet: for every request to /health, and every few seconds, whether this instance owns the source or not.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from evermark.app.build import Deployment
from evermark.breaker import Breaker, BreakerLimits
from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.stores import OwnedCheckpoints
from evermark.delivery.model import BEGINNING, CursorVector, SourcePartition
from evermark.delivery.status import durable_heads
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.errors import EvermarkError
from evermark.ingest.checkpoint_saver import AWAY
from evermark.ingest.copying.postgres import StateCopies
from evermark.log.head import Head, PostgresHeads
from evermark.observe.health import FailingCopy, HealthBoard, LagWatch, SourceAnswer
from evermark.observe.logging import get_logger, without_secrets
from evermark.sources.base import Source, Untaken
from evermark.sources.copies import CopyState
from evermark.sources.marks import Marks

FRESH_S = 1.0  # an answer this young is not asked for again
# Of many sources no more are asked in a second, and no more at the same time: an answer may then be as much older.
ASKED_A_SECOND_MAX = 100
ASKED_AT_ONCE_MAX = 16
WAIT_S = 3.0  # a request for health is answered after this long, even if a source is silent
OVERDUE_S = 10.0  # a source that has answered before may take this long now and then
EVERY_S = 5.0  # asked without a request, so that the time when a lag began is known
_HUNG_MAX = 3
_CONNECTIONS_MAX = 2
_STATEMENT_TIMEOUT_S = 3.0
_NO_ANSWER = "the source has not answered for {s:.0f} s when asked what there is to take"
_NO_ANSWER_HINT = "is its server, or the network to it, overloaded or hung?"

Clock = Callable[[], float]
V = TypeVar("V")


class Heads(Protocol):
    def load(self, source: str) -> Mapping[int, Head]: ...


class Checkpoints(Protocol):
    def list(self, source: str) -> Mapping[int, Checkpoint]: ...


@dataclass
class LagOf:
    """How long a source's untaken events have waited. Pure, but for its marks."""

    marks: dict[int, Marks] = field(default_factory=dict)

    def seconds(self, after: Mapping[int, str], found: Mapping[int, Untaken], now: float) -> dict[int, float]:
        """By partition; where the source does not know for how long its events wait, since first seen waiting."""
        lags: dict[int, float] = {}
        for partition, untaken in found.items():
            marks = self.marks.setdefault(partition, Marks())
            marks.note(untaken.upto, now)
            seen_s = marks.behind_s(after[partition], now)
            lags[partition] = seen_s if untaken.oldest_s is None else untaken.oldest_s
        for partition in set(self.marks) - set(found):
            del self.marks[partition]
        return lags


class Askers:
    """Threads that ask, so many at a time. A thread that has no answer after a second is not counted any more: another
    thread asks in its place.
    """

    def __init__(self, clock: Clock, at_once: int = ASKED_AT_ONCE_MAX) -> None:
        self._clock, self._at_once = clock, at_once
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, Callable[[], None]]] = deque()
        self._since: dict[int, float] = {}  # by number, since when each asks
        self._numbers = itertools.count()

    def begin(self, name: str, ask: Callable[[], None]) -> None:
        """Soon, in a thread. Raises `RuntimeError` where the machine has none to spare."""
        with self._lock:
            self._waiting.append((name, ask))
        self.go_on()

    def go_on(self) -> None:
        """One more asks, where a question waits and all that ask have themselves waited long for an answer."""
        with self._lock:
            asking = sum(self._clock() - began < FRESH_S for began in self._since.values())
            if not self._waiting or asking >= self._at_once:
                return
            number = next(self._numbers)
            self._since[number] = self._clock()
        try:
            threading.Thread(target=self._run, args=(number,), name="look", daemon=True).start()
        except RuntimeError:
            with self._lock:
                del self._since[number]
            raise

    def _run(self, number: int) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    del self._since[number]
                    return
                name, ask = self._waiting.popleft()
                self._since[number] = self._clock()
            threading.current_thread().name = f"look {name}"
            ask()


class SeenTogether(Generic[V]):
    """What State has of each source, looked up for all of them, once a second at most."""

    def __init__(self, load_all: Callable[[], Mapping[tuple[str, int], V]], clock: Clock) -> None:
        self._load_all, self._clock = load_all, clock
        self._lock = threading.Lock()
        self._at = float("-inf")
        self._found: dict[str, dict[int, V]] = {}

    def list(self, source: str) -> Mapping[int, V]:
        return self.load(source)

    def load(self, source: str) -> Mapping[int, V]:
        with self._lock:
            if self._clock() - self._at >= FRESH_S:
                found: dict[str, dict[int, V]] = {}
                for (name, partition), row in self._load_all().items():
                    found.setdefault(name, {})[partition] = row
                self._found, self._at = found, self._clock()
            return self._found.get(source, {})


class Look:
    """One question, asked by one thread at a time; a thread that hangs is left behind, a few of them at most."""

    def __init__(
        self,
        name: str,
        ask: Callable[[], None],
        late: Callable[[float], None],
        clock: Clock,
        askers: Askers | None = None,
        fresh_s: float = FRESH_S,
    ) -> None:
        self._name = name
        self._askers = askers or Askers(clock)
        self._fresh_s = fresh_s
        self._ask = ask
        self._late = late  # told for how long there has been no answer
        self._clock = clock
        self._changed = threading.Condition()
        self._answered = float("-inf")
        self._asked: float | None = None  # since when a question is really asked, and not answered
        self._running: list[float] = []  # when each question that has no answer yet was asked

    def begin(self) -> None:
        """Ask, unless the last answer is fresh or an answer is awaited."""
        now = self._clock()
        with self._changed:
            waited_for = any(now - began < OVERDUE_S for began in self._running)
            if waited_for or now - self._answered < self._fresh_s or len(self._running) > _HUNG_MAX:
                return
            self._running.append(now)
        try:
            self._askers.begin(self._name, lambda: self._look(now))
        except RuntimeError:  # the machine has no thread to spare: that there is no answer is said soon
            self._ended(now)

    def wait(self, until: float) -> None:
        """Wait for a fresh answer, at most until `until`. Then a long silence is reported."""
        with self._changed:
            while self._clock() - self._answered >= self._fresh_s:
                left = until - self._clock()
                if left <= 0 or (not self._changed.wait(min(left, FRESH_S)) and self._clock() >= until):
                    break
                with suppress(RuntimeError):  # the machine has no thread to spare
                    self._askers.go_on()
            silent_s = self._clock() - self._asked if self._asked is not None else 0.0
            if silent_s >= (WAIT_S if self._answered == float("-inf") else OVERDUE_S):
                self._late(silent_s)

    def _look(self, began: float) -> None:
        with self._changed:
            if self._asked is None:
                self._asked = self._clock()
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 - asked again; that there is no answer is said soon
            get_logger(part="lag").warning("a look failed", what=self._name, error=error)
            self._ended(began)
            return
        with self._changed:
            self._answered, self._asked = self._clock(), None
            self._changed.notify_all()
        self._ended(began)

    def _ended(self, began: float) -> None:
        with self._changed:
            self._running = [at for at in self._running if at != began]


class Lags:
    """Asks all sources of a deployment, and State, each by itself: a source that hangs holds up no other."""

    def __init__(self, deployment: Deployment, board: HealthBoard, clock: Clock = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._names = sorted(deployment.sources)
        self._state = deployment.another_state(
            connections_max=_CONNECTIONS_MAX, timeout_s=_STATEMENT_TIMEOUT_S, lock_timeout_s=_STATEMENT_TIMEOUT_S
        )
        self._heads = PostgresHeads(self._state)
        self._delivery = PostgresDelivery(self._state)
        self._copies = StateCopies(self._state)
        self._groups: dict[SourcePartition, Marks] = {}
        heads: Heads = self._heads
        checkpoints: Checkpoints = deployment.checkpoints_through(self._state)
        if len(self._names) > ASKED_AT_ONCE_MAX:  # a statement for each would be hundreds a second
            heads = SeenTogether(self._heads.load_all, clock)
            if isinstance(checkpoints, OwnedCheckpoints):
                checkpoints = SeenTogether(checkpoints.list_all, clock)
        self._sources = [
            SourceLook(name, source, checkpoints, board, clock, heads) for name, source in deployment.sources.items()
        ]
        askers, self._every_s = Askers(clock), max(EVERY_S, len(self._names) / ASKED_A_SECOND_MAX)
        fresh_s = max(FRESH_S, len(self._names) / ASKED_A_SECOND_MAX)
        self._looks = [
            *(Look(each.name, each.ask, each.late, clock, askers, fresh_s) for each in self._sources),
            Look("delivery", self._ask_delivery, lambda _: None, clock),
            Look("copies", self._ask_copies, lambda _: None, clock),
        ]
        self._watch = LagWatch()
        self._stopping = threading.Event()
        self._log = get_logger(part="lag")
        self._thread = threading.Thread(target=self._run, name="lag", daemon=True)

    def start(self) -> None:
        self._board.ask = self.ask
        self._thread.start()

    def stop(self) -> None:
        """Does not wait for a source that hangs: asking it changes nothing."""
        self._board.ask = lambda: None
        self._stopping.set()
        self._state.close()
        for source in self._sources:
            source.close()

    def ask(self) -> None:
        until = self._clock() + WAIT_S
        for look in self._looks:
            look.begin()
        for look in self._looks:
            look.wait(until)

    def _run(self) -> None:
        while True:
            try:
                self.ask()
                self._say_lags()
            except Exception as error:  # noqa: BLE001 - asked again
                self._log.warning("the lag could not be asked for", error=error)
            if self._stopping.wait(self._every_s):
                return

    def _say_lags(self) -> None:
        reports = self._board.partitions()
        began, over = self._watch.heard(reports)
        for name in began:
            report = reports[name]
            self._log.warning(
                "a partition lags", partition=name, lag_s=round(report.lag_s or 0.0), reason=report.reason
            )
        for name in over:
            self._log.info("a partition does not lag any more", partition=name)

    def _ask_delivery(self) -> None:
        try:
            heads = durable_heads(self._heads, self._names)
            groups = self._delivery.groups().values()
        except Exception as error:  # noqa: BLE001 - State that does not answer is said where partitions are owned
            self._log.debug("state could not be asked", error=error)
            return
        self._board.delivery.lag_s = group_lag_s(self._groups, heads, [one.cursors for one in groups], self._clock())

    def _ask_copies(self) -> None:
        try:
            listed = self._copies.listed()
        except Exception as error:  # noqa: BLE001 - as above
            self._log.debug("state could not be asked", error=error)
            return
        self._board.copies = [
            FailingCopy(each.id, each.source, each.stream, each.tries, each.error)
            for each in listed
            if each.source in self._names and each.error and each.state is not CopyState.FAILED
        ]


def group_lag_s(
    marks: dict[SourcePartition, Marks],
    heads: Mapping[SourcePartition, int],
    groups: Sequence[CursorVector],
    now: float,
) -> float:
    """For how long the log has been seen to go beyond a live group. Pure, but for the marks."""
    lags = [0.0]
    for place, head in heads.items():
        seen = marks.setdefault(place, Marks())
        seen.note(f"{head:020d}", now)
        least = min(cursors.get(place, BEGINNING).batch for cursors in groups)
        lags.append(seen.behind_s(f"{least:020d}", now))
    return max(lags)


def read_to(head: Head | None, checkpoint: Checkpoint | None) -> str | None:
    """Up to where a partition is in the log. A checkpoint may wait to be saved; where nothing came, only it moves."""
    if head is not None and (checkpoint is None or head.batch > checkpoint.batch):
        return head.passed_to or head.position
    return checkpoint.position if checkpoint is not None else None


@dataclass(eq=False)
class SourceLook:
    """Asks one source through a copy of its own: the owner's connections and locks are not waited for."""

    name: str
    source: Source
    checkpoints: Checkpoints
    board: HealthBoard
    clock: Clock
    heads: Heads | None = None
    _store: Breaker = field(default_factory=lambda: Breaker(BreakerLimits(threshold=1)), init=False)
    _away: EvermarkError | None = field(default=None, init=False)
    _known_heads: Mapping[int, Head] = field(default_factory=dict, init=False)
    _known: Mapping[int, Checkpoint] = field(default_factory=dict, init=False)
    _copy: Source | None = field(default=None, init=False)
    _lags: LagOf = field(default_factory=LagOf, init=False)
    _partitions: list[int] = field(default_factory=lambda: [0], init=False)
    _answered_at: float = field(default=float("-inf"), init=False)

    def ask(self) -> None:
        """Never raises: an error is an answer, too."""
        at = self.clock()
        source, self._copy = self._copy or _copied(self.source), None
        try:
            answer = self._answer(source, at)
        except Exception as error:  # noqa: BLE001 - any error is shown, and the source is asked again
            unknown = without_secrets(f"the source cannot be asked: {type(error).__name__}: {error}"[:500])
            told = (error.message, error.hint) if isinstance(error, EvermarkError) else (unknown, "")
            answer = SourceAnswer(at, refused=dict.fromkeys(self._partitions, told))
        if at >= self._answered_at:  # else it hung, and a later question was answered
            self._answered_at = at
            self._say(answer)
        self._close(self._copy)
        self._copy = source

    def late(self, silent_s: float) -> None:
        said = (_NO_ANSWER.format(s=silent_s), _NO_ANSWER_HINT)
        self._say(SourceAnswer(self.clock(), refused=dict.fromkeys(self._partitions, said)))

    def close(self) -> None:
        self._close(self._copy)

    def _say(self, answer: SourceAnswer) -> None:
        for partition in self._partitions:
            self.board.expect(self.name, partition)
        self.board.answered(self.name, answer)

    def _close(self, copy: Source | None) -> None:
        close = getattr(copy, "close", None)
        if close is not None and copy is not self.source:
            close()

    def _answer(self, source: Source, at: float) -> SourceAnswer:
        self._partitions = list(source.partitions())
        heads, checkpoints = self._taken()
        after: dict[int, str] = {}
        found: dict[int, Untaken] = {}
        refused: dict[int, tuple[str, str]] = {}
        for partition in self._partitions:
            try:
                known = read_to(heads.get(partition), checkpoints.get(partition))
                after[partition] = known if known is not None else source.earliest(partition)
            except EvermarkError as error:
                refused[partition] = (error.message, error.hint)
        while asked := {p: end for p, end in after.items() if p not in refused}:
            try:
                found = dict(source.untaken(asked))
            except EvermarkError as error:
                if error.partition not in asked:
                    raise
                refused[error.partition] = (error.message, error.hint)  # the others may be well
                continue
            break
        return SourceAnswer(at, self._lags.seconds(after, found, self.clock()), refused)

    def _taken(self) -> tuple[Mapping[int, Head], Mapping[int, Checkpoint]]:
        """While a store is away, as it was seen last: how a source is does not depend on it."""
        with suppress(*AWAY):
            self._known_heads = self.heads.load(self.name) if self.heads is not None else {}
        if not self._store.wait_s(self.clock()):
            try:
                self._known, self._away = self.checkpoints.list(self.name), None
                self._store.succeeded()
            except AWAY as error:
                self._store.failed(self.clock())  # one that hangs would make every answer late
                self._away = error
        if self._away is not None and not (self._known or self._known_heads):
            raise self._away
        return self._known_heads, self._known


def _copied(source: Source) -> Source:
    try:
        copy = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - Spark has other ways to carry it
        return source
    return copy if isinstance(copy, Source) else source
