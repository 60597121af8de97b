"""The memberships by which a span is delivered to bots, learned from the log itself.

No event is delivered to a bot before every join and leave up to the end of the span was learned: `views` looks through
the batches that are missing before it answers. Memberships stand in State with a cursor of their own, so that a crash
repeats a look, and never skips a batch. While nothing changes, that cursor is written only now and then: looking again
is harmless.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evermark import failpoint
from evermark.delivery.bots.membership import Move, lesson, moves_of, view_of
from evermark.delivery.decide.backlog import next_span
from evermark.delivery.model import BotSpec, BotView, Cursor, MembershipDelta, SourcePartition, Stay, SubscriptionSpec
from evermark.delivery.ports import BotStore
from evermark.delivery.work import Span
from evermark.errors import EngineError, EvermarkError
from evermark.event import Op
from evermark.log.opened import opened
from evermark.log.read import FileRange
from evermark.runtime import Lock

# With more streams than this, a bot's view is cut down to the streams of the span.
NARROWED_FROM = 100
_ALL_BATCHES = 2**63 - 1
# A payload may be written with spaces or without; rows that match without being joins are parsed and left out.
_TELLS = r'"kind"\s*:\s*"(join|leave)"'
_COLUMNS = ["stream", "op", "partition", "batch", "position", "payload"]
_PIECE_ROWS = 65_536

Read = Callable[[Sequence[str], int, int, int], list[dict[str, object]]]


def telling(paths: Sequence[str], partition: int, after: int, to: int) -> list[dict[str, Any]]:
    """Rows that may tell of membership in the batches `after < batch <= to` of a partition, in log order."""
    found = [row for path in paths for row in _in_file(path, partition, after, to)]
    return sorted(found, key=lambda row: (row["batch"], row["position"]))


def streams_in(paths: Sequence[str]) -> frozenset[str]:
    """The streams that some files have events of."""
    found: set[str] = set()
    for path in paths:
        with opened(path) as file:
            for piece in file.iter_batches(_PIECE_ROWS, columns=["stream"], use_threads=False):
                found.update(pc.unique(piece.column("stream")).to_pylist())
    return frozenset(found)


@dataclass(frozen=True)
class ViewLimits:
    # Rows that may be looked through while others wait; a bot that needs more is served by itself until it is level.
    quick_rows_max: int = 20_000
    look_rows: int = 500_000
    keep_every: int = 64  # batches without news


@dataclass
class _User:
    """The memberships of a user, as far as State has them and beyond."""

    to: dict[int, int]
    stays: dict[str, tuple[Stay, ...]]
    kept: dict[int, int]  # how far State knows
    moved: dict[int, int]  # the last batch of a partition that changed anything
    open: frozenset[str] | None = None  # streams it is a member of now; None: not known yet
    inboxes: frozenset[str] = frozenset()


@dataclass
class BotViews:
    """One per owner of the `deliver` lease. Several threads may ask at once."""

    store: BotStore
    files: Callable[[str], Sequence[FileRange]]
    epoch: int
    read: Read = telling
    streams: Callable[[Sequence[str]], frozenset[str]] = streams_in
    lock: Lock = field(default_factory=threading.Lock)
    limits: ViewLimits = ViewLimits()
    _known: dict[tuple[str, str], _User] = field(default_factory=dict, init=False)
    # By source and stream: the users of `_known` that are members, as far as was learned.
    _staying: dict[tuple[str, str], set[str]] = field(default_factory=dict, init=False)

    def views(self, specs: Iterable[SubscriptionSpec], span: Span, *, quick: bool = False) -> dict[str, BotView]:
        """The view of each bot among some subscriptions for a span. `quick`: others wait, so bots with too many rows
        to look through are left out.
        """
        bots = {spec.name: spec.bot for spec in specs if spec.bot is not None}
        mine = {name: wish for name, wish in bots.items() if wish.source == span.place.source}
        found = {name: BotView(wish) for name, wish in bots.items() if name not in mine}
        if mine:
            users = {wish.user for wish in mine.values()}
            ready = self._learn(span.place, users, span.to, span, self.limits.quick_rows_max if quick else None)
            with self.lock:
                views = {name: self._view(wish, span) for name, wish in mine.items() if wish.user in ready}
            found |= self._narrowed(views, span)
        return self._with_stopped(self._with_sessions(found))

    def view_of_all(
        self, spec: SubscriptionSpec, heads: dict[SourcePartition, int], replay_id: str = ""
    ) -> BotView | None:
        """The view of a bot for all of a source's log up to some heads; None if the subscription is no bot."""
        wish = spec.bot
        if wish is None:
            return None
        if any(place.source != wish.source for place in heads):
            return BotView(wish)  # streams of another source may be called the same
        for place, head in heads.items():
            self._learn(place, {wish.user}, head, None, None)
        with self.lock:
            view = view_of(wish, self._user(wish.source, wish.user).stays, 0, _ALL_BATCHES)
        return self._with_sessions({spec.name: view}, replay_id)[spec.name]

    def _narrowed(self, views: dict[str, BotView], span: Span) -> dict[str, BotView]:
        """Without streams that have no event in the span: there may be thousands, and each view goes to a task."""
        if all(len(view.member) <= NARROWED_FROM for view in views.values()):
            return views
        with _said(span):
            here = self.streams(span.paths)
        return {name: replace(view, member=view.member & here) for name, view in views.items()}

    def _with_sessions(self, views: dict[str, BotView], replay_id: str = "") -> dict[str, BotView]:
        names = [name for name, view in views.items() if view.wish.device and view.streams]
        if not names:
            return views
        clear = self.store.sessions_clear(names, replay_id)
        return views | {name: replace(views[name], clear=clear.get(name, frozenset())) for name in names}

    def _with_stopped(self, views: dict[str, BotView]) -> dict[str, BotView]:
        stopped = self.store.stopped([name for name, view in views.items() if view.streams]) if views else {}
        return views | {name: replace(views[name], stopped=streams) for name, streams in stopped.items()}

    def _view(self, wish: BotSpec, span: Span) -> BotView:
        user = self._user(wish.source, wish.user)
        if user.moved.get(span.place.partition, 0) > span.after:
            return view_of(wish, user.stays, span.after, span.to)
        if user.open is None:  # nothing changed in this span or after it: the same for every span from here on
            # Without the inbox this bot names: another bot may speak for the same user.
            now = view_of(replace(wish, inbox=""), user.stays, _ALL_BATCHES - 1, _ALL_BATCHES)
            user.open, user.inboxes = now.member, now.inboxes
        return BotView(wish, user.open, {}, user.inboxes | ({wish.inbox} if wish.inbox else frozenset()))

    def _learn(
        self, place: SourcePartition, users: set[str], to: int, span: Span | None, rows_max: int | None
    ) -> set[str]:
        """Look through the batches that are missing up to `to`. Returns the users of whom all is known then."""
        ready = set(users)
        while True:
            by_level: dict[int, set[str]] = defaultdict(set)
            with self.lock:
                for name in ready:
                    by_level[self._user(place.source, name).to.get(place.partition, 0)].add(name)
            behind = sorted(((at, some) for at, some in by_level.items() if at < to), reverse=True)
            if not behind:
                return ready
            # Asked again afterwards: another thread may have looked through a part of it meanwhile.
            for at, some in behind:
                if not self._look(place, some, at, to, span, rows_max):
                    ready -= some

    def _look(
        self, place: SourcePartition, users: set[str], after: int, to: int, span: Span | None, rows_max: int | None
    ) -> bool:
        if span is not None and after >= span.after:
            self._take(replace(span, begun=Cursor(after)), users)
            return True
        files = self.files(place.source)
        whole = next_span(place, Cursor(after), to, files, _ALL_BATCHES)
        if rows_max is not None and whole is not None and whole.rows > rows_max:
            return False
        while after < to:
            at = Cursor(after)
            piece = next_span(place, at, to, files, self.limits.look_rows) or Span(place, at, to, (), 0)
            self._take(piece, users)
            after = piece.to
        return True

    def _take(self, piece: Span, users: set[str]) -> None:
        """Look through some batches for users whose memberships are known up to right before them."""
        place = piece.place
        with _said(piece):
            rows = self.read(piece.paths, place.partition, piece.after, piece.to)
        with self.lock:
            known = {name: self._user(place.source, name) for name in users}
            moves: dict[str, list[Move]] = defaultdict(list)
            for move in moves_of(rows, users, lambda stream: self._staying.get((place.source, stream), ())):
                moves[move.user].append(move)
            # Another thread may have looked meanwhile.
            mine = {n: u for n, u in known.items() if u.to.get(place.partition, 0) == piece.after}
            lessons = [lesson(n, piece.after, piece.to, u.stays, moves.get(n, ())) for n, u in mine.items()]
            try:
                self._keep(place, lessons, known)
            except EvermarkError:
                for name in mine:  # it may have been kept all the same: State is asked before the next look
                    del self._known[place.source, name]
                raise
            for one in lessons:
                user = known[one.user]
                user.to[place.partition] = one.done_to
                if one.stays:
                    user.stays.update(one.stays)
                    last = max(map(_last, one.stays.values()))
                    user.moved[place.partition] = max(user.moved.get(place.partition, 0), last)
                    user.open = None
                self._note(place.source, one.user, one.stays)

    def _keep(self, place: SourcePartition, lessons: Sequence[MembershipDelta], known: dict[str, _User]) -> None:
        """Store changed memberships, and how far was looked: at once with a change, else now and then."""
        some = [replace(one, begun_at=known[one.user].kept.get(place.partition, 0)) for one in lessons]
        due = [one for one in some if one.stays or one.done_to - one.begun_at >= self.limits.keep_every]
        if due:
            self.store.learn(place.source, place.partition, due, self.epoch)
            failpoint.hit("bots.learned")
            for one in due:
                known[one.user].kept[place.partition] = one.done_to

    def _user(self, source: str, name: str) -> _User:
        """To be called with the lock."""
        user = self._known.get((source, name))
        if user is None:
            found = self.store.learned(source, name)
            # The partition of a stream is not known here: the last change of any stream counts for all partitions.
            last = max(map(_last, found.stays.values()), default=0)
            user = _User(dict(found.to), dict(found.stays), dict(found.to), dict.fromkeys(found.to, last))
            self._known[source, name] = user
            self._note(source, name, user.stays)
        return user

    def _note(self, source: str, user: str, stays: Mapping[str, Sequence[Stay]]) -> None:
        for stream, times in stays.items():
            if times[-1].end is None:
                self._staying.setdefault((source, stream), set()).add(user)
            elif here := self._staying.get((source, stream)):
                here.discard(user)
                if not here:
                    del self._staying[source, stream]


@contextmanager
def _said(span: Span) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise EngineError(
            f"memberships in batches {span.after + 1} to {span.to} of {span.place.source} could not be read: "
            f"{type(error).__name__}",
            hint="it is tried again",
        ) from error


def _last(stays: Sequence[Stay]) -> int:
    last = stays[-1]
    return (last.end or last.begin)[0]


def _in_file(path: str, partition: int, after: int, to: int) -> Iterator[dict[str, Any]]:
    with opened(path) as file:
        at = file.metadata.schema.names.index("batch")
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(at).statistics
            known = statistics is not None and statistics.has_min_max
            if known and (statistics.max <= after or statistics.min > to):
                continue
            # Piece by piece: a file may hold millions of events, with payloads of any size.
            for piece in file.iter_batches(_PIECE_ROWS, row_groups=[group], columns=_COLUMNS, use_threads=False):
                yield from piece.filter(_mine(piece, partition, after, to)).to_pylist()


def _mine(piece: pa.RecordBatch, partition: int, after: int, to: int) -> pa.Array:
    batch, op = piece.column("batch"), piece.column("op")
    within = pc.and_(pc.greater(batch, after), pc.less_equal(batch, to))
    within = pc.and_(within, pc.equal(piece.column("partition"), partition))
    said = pc.fill_null(pc.match_substring_regex(piece.column("payload"), _TELLS), False)
    tells = pc.and_(pc.equal(op, str(Op.MESSAGE)), said)
    whole = pc.is_in(op, value_set=pa.array([str(Op.TRUNCATE), str(Op.SCHEMA)]))
    return pc.and_(within, pc.or_(tells, whole))
