"""Where a user was a member, and when: from joins and leaves in the log. Pure.

Three kinds of rows tell of membership:

- a join or leave, as an event or, while a stream is taken again, as a `schema` row beside it;
- a description of a stream (`schema`) that lists its `members`, for users who are there without joining: the owner of
  an inbox, the two of a direct stream, the first members of a channel;
- a note (`truncate`) that a stream was deleted or recreated, which ends every stay, or that another history of it was
  accepted, which ends the stays of all but the `members` it lists. It begins no stay: the join of a listed member may
  be anywhere in the rows that follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evermark.delivery.bots.forward import parsed
from evermark.delivery.model import BotSpec, BotView, Mark, MembershipDelta, Stay
from evermark.errors import ConflictError
from evermark.event import Op

Stays = Mapping[str, tuple[Stay, ...]]


@dataclass(frozen=True)
class Move:
    """A user joined a stream, or left it."""

    stream: str
    user: str
    at: Mark
    joins: bool
    inbox: bool = False


def moves_of(
    rows: Iterable[Mapping[str, Any]], users: Collection[str], staying: Callable[[str], Iterable[str]]
) -> Iterator[Move]:
    """The joins and leaves of some users that rows of the log (stream, op, batch, position, payload) tell of, in order.
    `staying`: the users who may be in a stream before these rows: no other user can leave it.
    """
    joined: dict[str, set[str]] = defaultdict(set)  # in these rows
    for row in rows:
        said = parsed(row["payload"])
        if not isinstance(said, Mapping):
            continue
        stream, at, kind = row["stream"], (row["batch"], row["position"]), said.get("kind")
        if row["op"] == Op.MESSAGE or (row["op"] == Op.SCHEMA and kind in ("join", "leave")):
            member = said.get("member")
            if kind in ("join", "leave") and isinstance(member, str) and member in users:
                joined[stream].add(member)
                yield Move(stream, member, at, joins=kind == "join")
            continue
        members = said.get("members")
        if not isinstance(members, list) and said.get("change") not in ("deleted", "recreated"):
            continue
        listed = members if isinstance(members, list) else ()
        named = {user for user in listed if isinstance(user, str) and user in users}
        # A description is whole: a user it does not name is no member from there on.
        others = {user for user in (*staying(stream), *joined[stream]) if user in users}
        if row["op"] == Op.TRUNCATE:
            yield from (Move(stream, user, at, joins=False) for user in sorted(others - named))
            continue
        for user in sorted(named | others):
            yield Move(stream, user, at, joins=user in named, inbox=kind == "inbox")
        joined[stream] |= named


def after_move(stays: tuple[Stay, ...], move: Move) -> tuple[Stay, ...]:
    """The stays of a user in a stream after one more move. A move that was learned before changes nothing."""
    last = stays[-1] if stays else None
    if last is not None and move.at <= (last.end or last.begin):
        return stays
    if last is not None and last.end is None:
        return stays if move.joins else (*stays[:-1], Stay(last.begin, move.at, last.inbox))
    return (*stays, Stay(move.at, None, move.inbox)) if move.joins else stays


def lesson(user: str, begun_at: int, done_to: int, known: Stays, moves: Iterable[Move]) -> MembershipDelta:
    """The changes that some moves make for a user: all stays of each stream in which any stay changed."""
    changed: dict[str, tuple[Stay, ...]] = {}
    for move in moves:
        if move.user == user:
            before = changed.get(move.stream, known.get(move.stream, ()))
            after = after_move(before, move)
            if after != before:
                changed[move.stream] = after
    return MembershipDelta(user, begun_at, done_to, changed)


def require_learned(lessons: Iterable[MembershipDelta], at: Mapping[str, int]) -> None:
    """The compare of a compare-and-set: each lesson begins up to where its user was looked up."""
    for one in lessons:
        if at.get(one.user, 0) != one.begun_at:
            raise ConflictError(
                f"user {one.user!r} was looked up to batch {at.get(one.user, 0)}, and this begins at {one.begun_at}",
                hint="another instance looked meanwhile; nothing is lost",
            )


def view_of(wish: BotSpec, stays: Stays, after: int, to: int) -> BotView:
    """The view of a bot for the batches `after < batch <= to`."""
    member: set[str] = set()
    partly: dict[str, tuple[Stay, ...]] = {}
    inboxes: set[str] = {wish.inbox} if wish.inbox else set()
    for stream, times in stays.items():
        within = tuple(s for s in times if s.begin[0] <= to and (s.end is None or s.end[0] > after))
        if not within:
            continue
        if within[-1].inbox:
            inboxes.add(stream)
        if any(stay.begin[0] <= after and (stay.end is None or stay.end[0] > to) for stay in within):
            member.add(stream)
        else:
            partly[stream] = within
    return BotView(wish, frozenset(member), partly, frozenset(inboxes))
