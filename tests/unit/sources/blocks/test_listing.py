"""How far the listing of a node is read in one look, and from where the next look goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from evermark.errors import BusyError, FormatError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import Cookie
from evermark.sources.blocks.decide.resume import Answer
from evermark.sources.blocks.nodes.client import Listed, Listing, Node
from evermark.sources.blocks.stream_choice import BotStreams, ChosenStreams
from evermark.sources.blocks.target import Pace
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, pipeline
from tests.unit.sources.blocks.test_members import Some

ALL = Limit(wait_s=0.0)
_PAGES_MAX = 50


class Watched(ModelNode):
    """Does something after each page of its listing, and counts the pages."""

    def __init__(self, then: Callable[[], None], **more: int) -> None:
        super().__init__(**more)
        self.then, self.pages_listed = then, 0

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        found = super().listing(touched_after, wait_s)
        self.pages_listed += 1
        assert self.pages_listed < _PAGES_MAX, "the look does not come to an end"
        self.then()
        return found


@pytest.mark.parametrize("chosen", ["room", ""], ids=["one stream", "every stream"])
def test_a_look_at_a_node_where_streams_change_all_the_time_comes_to_an_end(chosen: str) -> None:
    """GIVEN a node on which a stream changes whenever its listing is read WHEN looked at THEN what was there before is
    offered, and the change waits for the next look."""
    node = Watched(lambda: node.say("other") and None)
    for stream in ("room", "other"):
        node.create(stream)
    node.say("room", 2)
    pipe = pipeline([node], choice=ChosenStreams(frozenset({chosen} - {""})))
    assert pipe.step(ALL)
    assert pipe.ids("room") == node.hashes("room")


def test_a_look_that_finds_nothing_ends_in_time_and_the_next_goes_on_from_there() -> None:
    """GIVEN more streams than can be listed in the time of a look, and another set of bots WHEN looked at again and
    again THEN all streams are looked at once more, in several looks."""
    now = [0.0]
    bots = Some()

    def takes_a_while() -> None:
        now[0] += 0.4

    node = Watched(takes_a_while)
    for n in range(30):
        node.create(f"s{n}")
    node.create("room", members=["later"])
    node.say("room")
    pipe = pipeline([node], choice=BotStreams(bots))
    pipe.source.planner._clock = lambda: now[0]
    looks = 0
    while pipe.source.plans.state(0).touched < node._touched:
        assert not pipe.step(ALL)
        looks += 1
    assert looks > 2
    bots.names.add("later")
    node.pages_listed = 0
    while not pipe.step(ALL):
        pass
    assert pipe.ids("room") == node.hashes("room")


@pytest.mark.parametrize("grows", [False, True], ids=["at rest", "growing"])
def test_a_long_gap_leaves_room_for_what_is_said_now(grows: bool) -> None:
    """GIVEN streams with gaps of many batches WHEN somebody says something in another stream THEN it is in the next
    batch, and the gaps are filled side by side."""
    node = ModelNode(page_blocks=10, resume_blocks=4)
    for stream in ("a", "b", "live"):
        node.create(stream)
    pipe = pipeline([node], pace=replace(PACE, blocks_max=20))
    pipe.drain(ALL)
    for stream in ("a", "b"):
        for _ in range(200):
            node.say(stream)
            node.seal(stream)
    for _ in range(3):
        pipe.step(ALL)
    for _ in range(5):
        if grows:
            node.say("a")
            node.seal("a")
        said = node.say("live")
        pipe.step(ALL)
        assert pipe.ids("live")[-1:] == said
    assert all(20 < len(pipe.ids(stream)) < 200 for stream in ("a", "b"))
    pipe.drain(ALL)
    for stream in ("a", "b", "live"):
        assert pipe.ids(stream) == node.hashes(stream)


@pytest.mark.parametrize("full", [False, True], ids=["whole batches", "full batches"])
def test_what_a_follower_owes_is_taken_of_the_node_that_has_it(full: bool) -> None:
    """GIVEN a follower that could not copy one stream WHEN it is read while its leader is away THEN the others are
    taken, and the owed stream when the leader is back, though the follower has listed later changes."""
    leader = ModelNode("one")
    for stream in ("owed", "good", "more"):
        leader.create(stream)
    before = leader.copied("two")
    pipe = pipeline([leader, before])
    pipe.drain(ALL)
    leader.say("owed")
    for stream in ("good", "more"):
        leader.say(stream, 2)
    follower = leader.copied("two")
    follower.streams["owed"], follower.owed, leader.down = before.streams["owed"], 1, True
    again = pipeline([leader, follower], pipe.source.plans)  # type: ignore[arg-type]
    again.log, again.ends = pipe.log, pipe.ends
    again.start()
    again.drain(Limit(rows_max=1, wait_s=0.0) if full else ALL)
    for stream in ("good", "more"):
        assert again.ids(stream) == leader.hashes(stream)
    leader.down = False
    again.start()  # anew: who was content with the follower asks the first node again, after a while
    again.drain(ALL)
    assert again.ids("owed") == leader.hashes("owed")


def test_a_follower_that_owes_streams_is_not_read_anew_at_every_look() -> None:
    """GIVEN a follower that owes a stream for good WHEN nothing changes THEN its listing is asked from its end on: a
    look costs no stream a request, and waiting waits. A plan that is voided is made again all the same."""
    node = Watched(lambda: None)
    node.owed = 1
    for stream in ("a", "b"):
        node.create(stream)
        node.say(stream)
    pipe = pipeline([node])
    found = pipe.source.latest(pipe.ends, ALL)
    pipe.source.latest(found, ALL)
    pipe.source.begin(0, pipe.ends[0])
    pipe.drain(ALL)
    for stream in ("a", "b"):
        assert pipe.ids(stream) == node.hashes(stream)
    node.cookies.clear()
    assert not pipe.step(Limit(wait_s=0.3))
    assert node.cookies == []
    assert node.pages_listed < 15


class Strained(ModelNode):
    """Refuses every request from the tenth on, until it has rested."""

    asked = 0

    def view(self, stream: str, cookie: Cookie | None) -> Answer:
        self._strain()
        return super().view(stream, cookie)

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        self._strain()
        rows: list[Listed] = []
        while some := super().listing(rows[-1].touched if rows else touched_after, wait_s).rows:
            rows += some
        last = rows[-1].touched if rows else touched_after
        return Listing(self.name, tuple(rows), last, self._touched)

    def _strain(self) -> None:
        self.asked += 1
        if self.asked >= 10:
            raise BusyError("503 busy")


def test_what_was_looked_through_before_a_node_refused_is_not_looked_through_again() -> None:
    """GIVEN a page of many streams without a bot, and a node that refuses after a few requests WHEN it is looked at
    again and again THEN each look goes on where the one before it was refused, and the stream at the end is taken."""
    node = Strained()
    for n in range(40):
        node.create(f"s{n}")
    node.create("room", members=["bot"])
    node.say("room")
    pipe = pipeline([node], choice=BotStreams(Some()))
    refused = 0
    while not pipe.ids("room"):
        node.asked = 0
        try:
            pipe.step(ALL)
        except BusyError:
            refused += 1
            assert refused < 10
    assert refused > 3
    assert pipe.ids("room") == node.hashes("room")


@pytest.mark.parametrize("numbers", [(5, 7, 7), (7, 6, 7), (6, 8, 7)], ids=["in place", "backwards", "beyond its end"])
def test_a_listing_that_leads_nowhere_is_refused(
    numbers: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN rows that are not after the number asked for, in order, and up to its end THEN it is not in the
    format: a reader would read it for ever, or pass a stream."""
    first, second, end = numbers
    rows = [{"stream": f"s{n}", "kind": "channel", "touched": n, "deleted": False} for n in (first, second)]
    node = Node("http://127.0.0.1:1", None, Pace())
    monkeypatch.setattr(node, "_ask", lambda *_: ({"node": "n", "streams": rows, "touched": end}, 0))
    with pytest.raises(FormatError, match="listing"):
        node.listing(5, 0)
    rows[:] = [{**rows[0], "touched": 6}, {**rows[0], "touched": 6, "kind": "chan\0nel"}]
    assert node.listing(5, 0).rows == (Listed(f"s{first}", "channel", 6, False), Listed(f"s{first}", "", 6, False))
