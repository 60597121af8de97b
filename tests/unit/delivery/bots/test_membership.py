"""D3: where a bot's user was a member, and when; from the log, before anything of it is delivered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.bots.membership import Move, after_move, lesson, moves_of, view_of
from evermark.delivery.bots.views import NARROWED_FROM, BotViews
from evermark.delivery.model import BotSpec, Cursor, SourcePartition, Stay
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.work import Span
from evermark.errors import EngineError, UnreachableError
from evermark.log.read import FileRange
from evermark.testing.contracts.scene import spec
from evermark.testing.states import owners

PLACE = SourcePartition("chat", 0)
WISH = BotSpec("chat", "bot")


def row(stream: str, batch: int, position: str, payload: dict[str, Any], op: str = "message") -> dict[str, Any]:
    return {"stream": stream, "op": op, "batch": batch, "position": position, "payload": json.dumps(payload)}


def join(stream: str, batch: int, position: str = "a", user: str = "bot", kind: str = "join") -> dict[str, Any]:
    return row(stream, batch, position, {"kind": kind, "creator": "alice", "member": user})


def nobody(_stream: str) -> tuple[str, ...]:
    return ()


def opening(stream: str, batch: int, position: str, *members: object, kind: str = "channel") -> dict[str, Any]:
    return row(stream, batch, position, {"kind": kind, "members": list(members)}, "schema")


def test_joins_and_leaves_of_registered_users_are_moves() -> None:
    """GIVEN rows of the log THEN joins and leaves of these users are found, and nothing else is."""
    rows = [
        join("room", 1),
        join("room", 2, kind="leave"),
        join("room", 3, user="carol"),
        row("room", 4, "a", {"kind": "message", "creator": "alice", "payload": {"kind": "join", "member": "bot"}}),
        {**join("room", 5), "payload": "{broken"},
    ]
    assert list(moves_of(rows, {"bot"}, nobody)) == [
        Move("room", "bot", (1, "a"), joins=True),
        Move("room", "bot", (2, "a"), joins=False),
    ]


def test_members_without_a_join_come_from_a_streams_description() -> None:
    """GIVEN the description of a direct stream or an inbox THEN those it lists are members, and nobody else is."""
    rows = [
        row("dm", 1, "a", {"kind": "direct", "members": ["alice", "bot"]}, "schema"),
        row("mail", 1, "b", {"kind": "inbox", "members": ["bot"]}, "schema"),
        row("gone", 1, "c", {"change": "deleted", "was": "x"}, "truncate"),
        row(
            "dm", 2, "a", {"change": "recreated", "was": "x", "kind": "direct", "members": ["alice", "eve"]}, "truncate"
        ),
    ]
    one = lesson("bot", 0, 2, {"gone": (Stay((0, "a")),)}, moves_of(rows, {"bot"}, lambda _: ["bot"]))
    assert one.stays == {
        "dm": (Stay((1, "a"), (2, "a")),),
        "mail": (Stay((1, "b"), None, inbox=True),),
        "gone": (Stay((0, "a"), (1, "c")),),
    }


def test_an_opening_tells_of_those_it_names_and_of_those_who_were_there() -> None:
    """GIVEN hundreds of bots WHEN a stream's description names one and another was there THEN it tells of these two."""
    users = {f"bot{n}" for n in range(300)}
    rows = [opening("room", 1, "a", "alice", "bot7"), row("room", 2, "a", {"change": "deleted"}, "truncate")]
    moves = list(moves_of(rows, users, lambda stream: ["bot8", "carol"] if stream == "room" else []))
    assert [(move.user, move.at[0], move.joins) for move in moves] == [
        ("bot7", 1, True),
        ("bot8", 1, False),
        ("bot7", 2, False),
        ("bot8", 2, False),
    ]


def test_an_opening_ends_the_stay_of_one_who_joined_right_before_it() -> None:
    """GIVEN a join and a description without that user in one piece of the log THEN the user is no member any more."""
    for first in (join("room", 1), opening("room", 1, "a", "bot")):
        one = lesson("bot", 0, 1, {}, moves_of([first, opening("room", 1, "b", "eve")], {"bot"}, nobody))
        assert one.stays == {"room": (Stay((1, "a"), (1, "b")),)}


def test_members_of_any_shape_tell_nothing_and_stop_nothing() -> None:
    """GIVEN a description whose members are no names THEN those among them that are some count, and no other."""
    odd = opening("room", 1, "a", ["bot"], {"a": 1}, None, 7, "bot")
    assert [(move.user, move.joins) for move in moves_of([odd], {"bot", "other"}, nobody)] == [("bot", True)]


marks = st.tuples(st.integers(1, 4), st.sampled_from("abc"))
histories = st.lists(st.tuples(marks, st.booleans()), max_size=8, unique_by=lambda one: one[0]).map(sorted)


@given(histories, st.integers(0, 8), st.data())
def test_learning_again_changes_nothing(history: list[Any], cut: int, data: st.DataObject) -> None:
    """GIVEN any joins and leaves WHEN some are learned twice, as after a crash THEN the stays are those of once."""
    moves = [Move("room", "bot", at, joins=joins) for at, joins in history]
    once: tuple[Stay, ...] = ()
    for move in moves:
        once = after_move(once, move)
    twice: tuple[Stay, ...] = ()
    for move in [*moves[:cut], *moves]:
        twice = after_move(twice, move)
    assert once == twice


@given(histories, st.integers(0, 4), st.integers(1, 3))
def test_a_view_agrees_with_the_history(history: list[Any], after: int, batches: int) -> None:
    """GIVEN any history and span THEN the view says of each position in it what the history up to there says."""
    stays: tuple[Stay, ...] = ()
    for at, joins in history:
        stays = after_move(stays, Move("room", "bot", at, joins=joins))
    view = view_of(WISH, {"room": stays} if stays else {}, after, after + batches)
    for batch in range(after + 1, after + batches + 1):
        for position in ("a5", "b5", "c5"):
            at = (batch, position)
            is_in = next((joins for mark, joins in reversed(history) if mark < at), False)
            found = "room" in view.member or any(stay.covers(at) for stay in view.partly.get("room", ()))
            assert found is is_in


class Log:
    """Files of one batch each, and what was read of them."""

    def __init__(self, *rows: dict[str, Any], batches: int = 5, rows_each: int = 10) -> None:
        self.rows = rows
        self.batches, self.rows_each = batches, rows_each
        self.reads: list[tuple[int, int]] = []

    def files(self, _source: str) -> list[FileRange]:
        return [FileRange(str(n), 0, 0, n, n, self.rows_each, 1) for n in range(1, self.batches + 1)]

    def read(self, paths: Sequence[str], _partition: int, after: int, to: int) -> list[dict[str, Any]]:
        self.reads.append((after, to))
        assert {str(n) for n in range(after + 1, to + 1)} <= set(paths)
        return [r for r in self.rows if after < r["batch"] <= to]


@pytest.fixture
def store() -> MemoryDelivery:
    return MemoryDelivery(MemoryLeases(is_gone=lambda holder: True))


def sight_of(store: MemoryDelivery, log: Log) -> BotViews:
    epoch = owners(store.tables._leases)(DELIVER_LEASE)
    return BotViews(store.bots, log.files, epoch, log.read)


def span(after: int, to: int) -> Span:
    return Span(PLACE, Cursor(after), to, tuple(str(n) for n in range(after + 1, to + 1)), 10, exact=True)


BOT = spec("helper", bot=WISH)


def test_d3_nothing_is_judged_before_its_memberships_are_learned(store: MemoryDelivery) -> None:
    """GIVEN joins in earlier batches and in the span itself WHEN asked for the span THEN all of them are known."""
    log = Log(join("old", 1), join("left", 1, "b"), join("left", 2, kind="leave"), join("new", 3, "m"))
    view = sight_of(store, log).views([BOT], span(2, 3))["helper"]
    assert view.member == {"old"}
    assert view.partly == {"new": (Stay((3, "m")),)}


def test_each_batch_is_looked_through_once(store: MemoryDelivery) -> None:
    """GIVEN spans in a row THEN each is read once, and the view of a quiet span is that of the last join."""
    log = Log(join("room", 1))
    bot_views = sight_of(store, log)
    views = [bot_views.views([BOT], span(n, n + 1), quick=True)["helper"] for n in range(4)]
    assert log.reads == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [view.member for view in views] == [frozenset(), *[frozenset({"room"})] * 3]
    assert bot_views.views([BOT], span(3, 4))["helper"] == views[-1]
    assert len(log.reads) == 4


def test_d15_what_was_learned_survives_and_is_never_skipped(store: MemoryDelivery) -> None:
    """GIVEN a crash after a quiet batch was looked through THEN the next owner looks again, from the last news on."""
    log = Log(join("room", 1), join("room", 4, kind="leave"))
    first = sight_of(store, log)
    first.views([BOT], span(0, 1))
    first.views([BOT], span(1, 2))
    log.reads.clear()
    second = sight_of(store, log)
    assert second.views([BOT], span(2, 3))["helper"].member == {"room"}
    assert log.reads == [(1, 3)]
    assert second.views([BOT], span(3, 4))["helper"].partly == {"room": (Stay((1, "a"), (4, "a")),)}
    assert second.views([BOT], span(4, 5))["helper"].streams == frozenset()
    assert second.views([BOT], span(2, 3))["helper"].member == {"room"}  # one that is behind, later


@pytest.mark.parametrize("restarted", [False, True])
def test_d3_an_opening_states_the_whole_membership(store: MemoryDelivery, restarted: bool) -> None:
    """GIVEN a bot that joined in a history that was rejected WHEN the stream is described anew, without it THEN it gets
    nothing from there on, and one that is named does; also where the join was learned by another owner."""
    other = spec("other", bot=replace(WISH, user="other"))
    log = Log(join("room", 1), opening("room", 3, "m", "alice", "other"), join("room", 5))
    bot_views = sight_of(store, log)
    assert bot_views.views([BOT, other], span(0, 1))["helper"].streams == {"room"}
    if restarted:
        bot_views = sight_of(store, log)
    views = bot_views.views([BOT, other], span(2, 3))
    assert views["helper"].partly == {"room": (Stay((1, "a"), (3, "m")),)}
    assert views["other"].partly == {"room": (Stay((3, "m")),)}
    views = bot_views.views([BOT, other], span(3, 4))
    assert (views["helper"].streams, views["other"].member) == (frozenset(), {"room"})
    assert bot_views.views([BOT, other], span(4, 5))["helper"].partly == {"room": (Stay((5, "a")),)}


def test_d3_a_note_that_a_fork_was_accepted_ends_stays_and_begins_none() -> None:
    """GIVEN a note that names who is left at the end of a history THEN all others' stays end, and nobody's begins: who
    is named may join anywhere in what follows."""
    anew = {"change": "fork accepted", "block": 3, "was": "x", "kind": "channel", "members": ["stays", "comes"]}
    rows = [join("room", 1, user="stays"), join("room", 2, user="goes"), row("room", 3, "a", anew, "truncate")]
    found = list(moves_of(rows, {"stays", "goes", "comes"}, nobody))
    assert found[2:] == [Move("room", "goes", (3, "a"), joins=False)]


def test_d3_what_is_told_of_a_stream_that_is_taken_again_counts_as_the_event_does() -> None:
    """GIVEN rows that tell of a join and a leave, though the log has the events THEN they are moves at their place."""
    told = [
        row("room", n, "a", {"kind": kind, "member": "bot", "event": "e"}, "schema")
        for n, kind in enumerate(["join", "leave"], 1)
    ]
    assert [(move.joins, move.at) for move in moves_of(told, {"bot"}, nobody)] == [(True, (1, "a")), (False, (2, "a"))]


def test_a_bot_that_would_keep_others_waiting_is_left_out(store: MemoryDelivery) -> None:
    """GIVEN a bot registered late in a long log WHEN others wait THEN it has no view yet; by itself it gets one."""
    log = Log(join("room", 1), rows_each=100_000)
    bot_views = sight_of(store, log)
    assert bot_views.views([BOT], span(4, 5), quick=True) == {}
    assert log.reads == []
    assert bot_views.views([BOT], span(4, 5))["helper"].member == {"room"}
    assert bot_views.views([BOT], span(4, 5), quick=True)["helper"].member == {"room"}


def test_a_later_bot_learns_from_the_beginning_and_the_first_does_not(store: MemoryDelivery) -> None:
    """GIVEN a second bot WHEN it is first asked for THEN only its own past is looked up."""
    log = Log(join("room", 1), join("room", 2, user="other"))
    bot_views = sight_of(store, log)
    bot_views.views([BOT], span(3, 4))
    log.reads.clear()
    later = spec("later", bot=replace(WISH, user="other"))
    found = bot_views.views([BOT, later], span(4, 5))
    assert log.reads == [(4, 5), (0, 5)]
    assert (found["helper"].member, found["later"].member) == ({"room"}, {"room"})


def test_a_bot_has_nothing_to_do_with_other_sources(store: MemoryDelivery) -> None:
    """GIVEN a span of another source THEN the bot gets nothing, and nothing is read for it."""
    log = Log(join("room", 1))
    elsewhere = replace(span(0, 1), place=SourcePartition("shop", 0))
    assert sight_of(store, log).views([BOT], elsewhere, quick=True)["helper"].streams == frozenset()
    assert log.reads == []


def test_an_inbox_may_be_named(store: MemoryDelivery) -> None:
    """GIVEN a bot that names its inbox THEN that stream is one of its own, whatever the log says."""
    named = spec("helper", bot=replace(WISH, inbox="mail"))
    assert sight_of(store, Log()).views([named], span(0, 1))["helper"].inboxes == {"mail"}


def test_an_inbox_that_one_bot_names_is_no_other_bots(store: MemoryDelivery) -> None:
    """GIVEN two bots of one user WHEN one names an inbox THEN the other has nothing to do with it, whoever is first."""
    named, plain = spec("a", bot=replace(WISH, inbox="mail")), spec("b", bot=WISH)
    for order in ([named, plain], [plain, named]):
        views = sight_of(store, Log()).views(order, span(0, 1))
        assert (views["a"].inboxes, views["b"].inboxes) == ({"mail"}, frozenset())


@pytest.mark.parametrize("member", [["x"], {"a": 1}, 7, None, True])
def test_a_join_of_nobody_is_no_join(member: object) -> None:
    """GIVEN a payload of any shape WHEN it is looked through THEN it tells nothing, and stops nothing."""
    row = join("room", 1)
    odd = {**row, "payload": json.dumps({"kind": "join", "member": member})}
    assert list(moves_of([odd], {"bot"}, nobody)) == []


def test_a_replay_sees_every_stay(store: MemoryDelivery) -> None:
    """GIVEN a user that came and went WHEN the past is replayed THEN each event is judged by its own time."""
    log = Log(join("room", 1), join("room", 2, kind="leave"), join("room", 4))
    view = sight_of(store, log).view_of_all(BOT, {PLACE: 5})
    assert view is not None
    assert view.partly == {"room": (Stay((1, "a"), (2, "a")), Stay((4, "a")))}


def test_a_replay_of_another_source_gives_a_bot_nothing(store: MemoryDelivery) -> None:
    """GIVEN a member of a room WHEN another source has a stream of that name THEN a replay of it is not the bot's."""
    bot_views = sight_of(store, Log(join("room", 1)))
    here, elsewhere = (bot_views.view_of_all(BOT, {place: 5}) for place in (PLACE, SourcePartition("elsewhere", 0)))
    assert here is not None and elsewhere is not None
    assert ("room" in here.streams, "room" in elsewhere.streams) == (True, False)


def test_a_lesson_that_was_kept_without_an_answer_is_not_given_again(store: MemoryDelivery) -> None:
    """GIVEN State that keeps a lesson and does not answer THEN the next look begins where State stands, and goes on."""
    log = Log(join("room", 1), join("room", 2, kind="leave"), join("den", 3))
    bot_views, learn = sight_of(store, log), store.bots.learn

    def lost(*given: Any) -> None:
        learn(*given)
        raise UnreachableError("the answer is lost")

    store.bots.learn = lost  # type: ignore[method-assign]
    with pytest.raises(UnreachableError):
        bot_views.views([BOT], span(0, 1))
    store.bots.learn = learn  # type: ignore[method-assign]
    assert bot_views.views([BOT], span(0, 1))["helper"].partly == {"room": (Stay((1, "a")),)}
    assert bot_views.views([BOT], span(1, 2))["helper"].partly == {"room": (Stay((1, "a"), (2, "a")),)}
    assert bot_views.views([BOT], span(2, 3))["helper"].streams == {"den"}


def test_a_log_that_cannot_be_read_is_an_error_that_says_so(store: MemoryDelivery) -> None:
    """GIVEN a file that is gone THEN it is an error of ours, told by its name, and the next look begins anew."""
    log = Log(join("room", 1))
    bot_views = sight_of(store, log)

    def gone(*_: Any) -> list[dict[str, Any]]:
        raise FileNotFoundError("a file")

    bot_views.read = gone
    with pytest.raises(EngineError, match="batches 1 to 1 of chat"):
        bot_views.views([BOT], span(0, 1))
    bot_views.read = log.read
    assert bot_views.views([BOT], span(0, 1))["helper"].streams == {"room"}


def test_d3_two_that_look_at_once_leave_nothing_out(store: MemoryDelivery) -> None:
    """GIVEN somebody else who learns a part meanwhile THEN whoever asked for more gets all of it, the rest included."""
    log = Log(join("room", 1), join("den", 5))
    bot_views = sight_of(store, log)

    def meanwhile(*given: Any) -> list[dict[str, Any]]:
        bot_views.read = log.read
        assert bot_views.views([BOT], span(0, 3))["helper"].streams == {"room"}
        return log.read(*given)

    bot_views.read = meanwhile
    assert bot_views.views([BOT], span(4, 5))["helper"].streams == {"room", "den"}


def test_a_view_of_thousands_of_streams_is_cut_down_to_those_of_the_span(store: MemoryDelivery) -> None:
    """GIVEN a bot in very many streams THEN a task is told of those that the span has events of, and of no other."""
    log = Log(*(join(f"s{n}", 1, f"{n:04}") for n in range(NARROWED_FROM + 1)))
    bot_views = sight_of(store, log)
    bot_views.streams = lambda paths: frozenset({"s7", "elsewhere"}) if paths == ("2",) else frozenset()
    assert bot_views.views([BOT], span(1, 2))["helper"].streams == {"s7"}
