"""Events that a node sends in a form that cannot be read: the others are asked, and poison is what nobody can give."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import pytest
from structlog.testing import capture_logs

from evermark.errors import FormatError, UnreachableError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import Undecoded, UnreadableError, block_from, verify_block
from evermark.sources.blocks.doctor import about_streams
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.sources.blocks.nodes.unreadable import read_by_any
from evermark.sources.blocks.stream_choice import BotStreams
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, Pipeline, pipeline, place
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)
FETCHED = replace(PACE, carried_bytes_max=4)  # blocks are too large to be carried along
HOWEVER_IT_COMES = pytest.mark.parametrize(
    ("pace", "block"), [(PACE, 5), (PACE, 3), (FETCHED, 5)], ids=["carried", "in a gap", "too large to be carried"]
)


def nodes(blocks: int = 6, count: int = 2) -> list[ModelNode]:
    """The same streams: `a` with that many blocks of two events, and a small one beside it."""
    leader = ModelNode(snapshot_every=4, page_blocks=2, numbers=itertools.count())
    for stream, size in (("a", blocks), ("other", 1)):
        leader.create(stream)
        for _ in range(size):
            leader.say(stream, 2)
            leader.seal(stream)
    return [leader, *(leader.copied(f"copy {n}") for n in range(1, count))]


def ops(pipe: Pipeline, stream: str = "a") -> set[str]:
    return {row["op"] for row in pipe.rows(stream)} - {"schema"}


def poison(pipe: Pipeline) -> list[dict[str, Any]]:
    return [row for row in pipe.rows("a") if row["op"] == "poison"]


def garble(some: Sequence[ModelNode], block: int = 3) -> str:
    for node in some:
        node.garbled.add(("a", block))
    return some[0].streams["a"].blocks[block].events[0].hash


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def on_a_clock() -> tuple[MemoryPlans, Clock]:
    plans, clock = MemoryPlans(), Clock()
    plans.clock = clock
    return plans, clock


@pytest.mark.parametrize(
    "form", [{}, {"hash": 5}, None, "text", [], {"hash": "f" * 64}, {"kind": "hologram"}], ids=repr
)
def test_whatever_stands_for_an_event_its_block_says_which_it_is(form: Any) -> None:
    """GIVEN a block with something else in the place of an event THEN it is a sound block with an unreadable event."""
    (node,) = nodes(count=1)
    block = node.streams["a"].blocks[3]
    wire = block.wire()
    wire["events"][1] = form
    with pytest.raises(FormatError):
        block_from(wire, "a")
    found = block_from(wire, "a", raw=True)
    verify_block(found, block.previous)
    odd = found.events[1]
    assert isinstance(odd, Undecoded)
    assert (odd.hash, json.loads(odd.raw)) == (block.event_hashes[1], form)
    wire["events"].append(form)
    with pytest.raises(FormatError):
        verify_block(block_from(wire, "a", raw=True), block.previous)


@HOWEVER_IT_COMES
@pytest.mark.parametrize("liar", [0, 1])
def test_b12_what_one_node_sends_unreadable_another_one_gives(pace: Any, block: int, liar: int) -> None:
    """GIVEN one of two that sends an event's hash alone THEN the event is logged as itself, and nothing is stale."""
    both, plans = nodes(), MemoryPlans()
    garble([both[liar]], block)
    pipe = pipeline(both, plans, pace=pace)
    pipe.drain(ALL)
    assert pipe.ids("a") == both[0].hashes("a")
    assert ops(pipe) == {"message"}
    assert plans.gaps == {}


@HOWEVER_IT_COMES
def test_two_nodes_that_each_hide_another_event_hide_none(pace: Any, block: int) -> None:
    """GIVEN two that each send another event unreadable THEN each event is had from the other one."""
    both = nodes()
    garble([both[0]], block - 1)
    garble([both[1]], block)
    pipe = pipeline(both, pace=pace)
    pipe.drain(ALL)
    assert pipe.ids("a") == both[0].hashes("a")
    assert ops(pipe) == {"message"}


@HOWEVER_IT_COMES
@pytest.mark.parametrize("count", [1, 3])
def test_what_every_node_sends_unreadable_is_poison_at_once_and_said(pace: Any, block: int, count: int) -> None:
    """GIVEN an event that nobody gives readable THEN it is poison, once, loudly, and the stream goes on."""
    some = nodes(count=count)
    hidden = garble(some, block)
    pipe = pipeline(some, pace=pace)
    with capture_logs() as said:
        pipe.drain(ALL)
    (row,) = poison(pipe)
    assert json.loads(row["payload"])["event"] == hidden
    assert json.loads(row["bytes"]) == {"hash": hidden}
    rest = [name for name in some[0].hashes("a") if name != hidden]
    assert [name for name in pipe.ids("a") if name != row["event_id"]] == rest
    loud = [line for line in said if line["log_level"] == "error"]
    assert [(line["event"], line["stream"], line["first"]) for line in loud] == [("blocks_poison", "a", hidden)]


@HOWEVER_IT_COMES
@pytest.mark.parametrize("trouble", ["down", "lies", "behind"])
def test_b10_while_a_node_cannot_be_asked_the_stream_is_stale_and_nobody_else(
    pace: Any, block: int, trouble: str
) -> None:
    """GIVEN an unreadable event and another node that is down, forges it, or has not got it yet THEN it is waited for,
    and the other streams go on; WHEN that node is well THEN the event is logged as itself."""
    both, plans = nodes(), MemoryPlans()
    garble([both[0]], block)
    whole = both[1].streams["a"]
    if trouble == "down":
        both[1].down = True
    elif trouble == "lies":
        both[1].lies.add(("a", block))
    else:
        both[1].streams["a"] = replace(whole, blocks=whole.blocks[:2], snapshot=0)
    pipe = pipeline(both, plans, pace=pace)
    pipe.drain(ALL)
    pipe.drain(ALL)
    assert pipe.ids("other") == both[0].hashes("other")
    gap = plans.stale(0)["a"]
    assert (gap.unreadable, gap.block) == (True, block)
    assert poison(pipe) == []
    both[1].down = False
    both[1].lies.clear()
    both[1].streams["a"] = whole
    pipe.drain(ALL)
    assert pipe.ids("a") == both[0].hashes("a")
    assert ops(pipe) == {"message"}
    assert plans.gaps == {}


@HOWEVER_IT_COMES
def test_a_node_that_stays_away_is_waited_for_and_not_for_ever(pace: Any, block: int) -> None:
    """GIVEN an unreadable event and a node that is away WHEN it had its time THEN it is poison, and not before."""
    both, (plans, clock) = nodes(), on_a_clock()
    garble([both[0]], block)
    both[1].down = True
    pipe = pipeline(both, plans, pace=pace)
    pipe.drain(ALL)
    clock.now = pace.unreadable_s - 1
    pipe.drain(ALL)
    assert poison(pipe) == []
    clock.now = pace.unreadable_s
    both[0].say("a")  # it is listed, too: looked at twice
    pipe.drain(ALL)
    assert len(poison(pipe)) == 1
    assert len(pipe.ids("a")) == len(both[0].hashes("a"))
    assert plans.gaps == {}


def test_a_state_that_is_away_makes_no_stream_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an unreadable event that is fetched, and a node that is away WHEN State cannot say for how long it was
    waited THEN that is the error, and no stream is marked for it."""
    both, plans = nodes(), MemoryPlans()
    garble([both[0]])
    pipe = pipeline(both, plans, pace=FETCHED)
    start = pipe.ends[0]
    pieces = pipe.source.slices(0, start, pipe.source.latest(pipe.ends, ALL)[0])
    both[1].down = True

    def away(partition: int) -> NoReturn:
        raise UnreachableError("State is away")

    monkeypatch.setattr(plans, "stale", away)
    with pytest.raises(UnreachableError, match="State is away") as caught:
        [list(pipe.source.read(piece)) for piece in pieces]
    assert caught.value.message == "State is away"
    assert plans.gaps == {}


def test_the_others_are_asked_page_by_page() -> None:
    """GIVEN unreadable events in five blocks WHEN another node gives three blocks at once THEN two requests do."""
    both = nodes()
    both[1].page_blocks = 3
    for block in range(1, 6):
        garble([both[0]], block)
    client = NodeClient(both, PACE)
    blocks = [block for start in (1, 3, 5) for block in both[0].page("a", start, start + 2)]
    read_by_any(client, "a", blocks, lambda: False)
    assert [pages[1:] for pages in both[1].pages] == [(1, 6), (4, 6)]


def test_waiting_goes_on_while_nobody_can_be_asked_at_all() -> None:
    """GIVEN a wait for one node WHEN the one that lies is away for a moment, too THEN its time does not begin anew."""
    both, (plans, clock) = nodes(), on_a_clock()
    garble([both[0]])
    both[1].down = True
    pipe = pipeline(both, plans, pace=PACE)
    pipe.drain(ALL)
    clock.now = PACE.unreadable_s / 2
    both[0].refusing = 1
    pipe.step(ALL)
    assert plans.stale(0)["a"].unreadable
    clock.now = PACE.unreadable_s
    pipe.drain(ALL)
    assert len(poison(pipe)) == 1


def test_a_wait_for_something_else_does_not_count() -> None:
    """GIVEN a stream that was stale for long WHEN an event of it is found unreadable THEN that has its own time."""
    both, (plans, clock) = nodes(), on_a_clock()
    garble([both[0]])
    both[1].down = True
    plans.begin(0, 0)
    plans.mark_stale(0, "a", 0, "nobody has it")
    clock.now = 2 * PACE.unreadable_s
    pipe = pipeline(both, plans, pace=PACE)
    pipe.drain(ALL)
    assert plans.stale(0)["a"].lasted_s == 0
    assert poison(pipe) == []


def test_doctor_says_what_to_do_about_a_node_that_is_waited_for() -> None:
    """GIVEN a stream with an event that cannot be read THEN the node that does not answer is to be repaired."""
    both, plans = nodes(), MemoryPlans()
    garble([both[0]])
    both[1].down = True
    pipeline(both, plans).drain(ALL)
    (finding,) = about_streams(plans, place())
    assert "copy 1 is down" in finding.found
    assert "take it out" in finding.mend


def test_b10_a_node_that_does_not_answer_is_not_waited_for_stream_by_stream() -> None:
    """GIVEN many streams with unreadable events and a node that does not answer WHEN it is asked THEN not for each."""
    both = nodes()
    garble([both[0]])
    asked: list[str] = []

    def page(stream: str, _start: int, _end: int) -> NoReturn:
        asked.append(stream)
        raise UnreachableError("copy 1 is down")

    there, both[1].page = both[1].page, page  # type: ignore[method-assign]
    client = NodeClient(both, replace(PACE, away_s=1000.0))
    blocks = both[0].page("a", 3, 4)
    for _ in range(3):
        with pytest.raises(UnreadableError, match="copy 1 is down"):
            read_by_any(client, "a", blocks, lambda: False)
    assert asked == ["a"]
    client.pace = PACE
    both[1].page = there  # type: ignore[method-assign]
    assert read_by_any(client, "a", blocks, lambda: False) == tuple(both[0].streams["a"].blocks[3:4])


def test_a_node_without_the_stream_is_not_waited_for() -> None:
    """GIVEN a second node that says there is no such stream THEN there is nobody to wait for."""
    both = nodes()
    garble([both[0]])
    both[1].delete("a")
    pipe = pipeline(both)
    pipe.drain(ALL)
    assert len(poison(pipe)) == 1


@pytest.mark.parametrize("pace", [PACE, FETCHED], ids=["carried", "fetched"])
def test_what_was_taken_from_the_minipool_need_not_be_read_again(pace: Any) -> None:
    """GIVEN events that were logged WHEN their block has one unreadable and the other node is away THEN all is well."""
    both, plans = nodes(), MemoryPlans()
    pipe = pipeline(both, plans, pace=pace)
    both[0].say("a", 2)
    pipe.drain(ALL)
    both[0].seal("a")
    both[1].down = True
    garble([both[0]], both[0].streams["a"].cookie.minipool_gen - 1)
    both[0].say("a")
    pipe.drain(ALL)
    assert pipe.ids("a") == both[0].hashes("a")
    assert plans.gaps == {}


def test_poison_keeps_no_readable_event_out_of_the_log() -> None:
    """GIVEN poison in the log WHEN the stream is compared with it THEN the event, once readable, is logged, and what
    is still unreadable is not there twice."""
    (node,) = nodes(count=1)
    hidden = [garble([node], block) for block in (2, 3)]
    pipe = pipeline([node])
    pipe.drain(ALL)
    node.garbled.discard(("a", 3))
    again = pipeline([node], MemoryPlans())  # State is lost, the log is not
    again.log, again.ends = pipe.log, pipe.ends
    again.start()
    again.drain(ALL)
    assert [json.loads(row["payload"])["event"] for row in poison(again)] == hidden
    messages = [row["event_id"] for row in again.rows("a") if row["op"] == "message"]
    assert sorted(messages) == sorted(set(node.hashes("a")) - {hidden[0]})


@dataclass(frozen=True)
class OneBot:
    def users(self) -> frozenset[str]:
        return frozenset({"bot"})

    def inboxes(self) -> frozenset[str]:
        return frozenset()

    def version(self) -> str:
        return "one"


@pytest.mark.parametrize("away", [False, True])
def test_b13_a_join_that_one_node_hides_makes_a_stream_wanted_all_the_same(away: bool) -> None:
    """GIVEN a node that sends a bot's join unreadable THEN the other one's word counts, as soon as it can be asked."""
    leader, plans = ModelNode(), MemoryPlans()
    leader.create("a")
    leader.join("a", "bot")
    leader.seal("a")
    other = leader.copied("two")
    garble([leader], 1)
    other.down = away
    pipe = pipeline([leader, other], plans, choice=BotStreams(OneBot()))
    pipe.drain(ALL)
    assert (pipe.ids("a") == [], "a" in plans.gaps) == (away, away)
    other.down = False
    pipe.drain(ALL)
    assert pipe.ids("a") == leader.hashes("a")
    pipe.source.upkeep()
    assert "a" in plans.streams


def test_a_stream_is_not_forgotten_while_a_join_of_it_cannot_be_read() -> None:
    """GIVEN a bot's stream whose join is shown unreadable, and nobody else to ask now THEN upkeep keeps it."""
    leader, plans = ModelNode(), MemoryPlans()
    leader.create("a")
    leader.join("a", "bot")
    leader.seal("a")
    other = leader.copied("two")
    pipe = pipeline([leader, other], plans, choice=BotStreams(OneBot()))
    pipe.drain(ALL)
    garble([leader], 1)
    other.down = True
    pipe.source.upkeep()
    assert "a" in plans.streams


def test_b10_poison_that_was_taken_makes_no_stream_stale_again_after_a_restart() -> None:
    """GIVEN a bot's stream with poison that was waited for, and a node that is away WHEN reading begins again THEN the
    stream is not waited for once more, at a block that was taken long ago."""
    leader = ModelNode(snapshot_every=100)
    leader.create("a", members=["bot"])
    for _ in range(3):
        leader.say("a", 2)
        leader.seal("a")
    other = leader.copied("two")
    garble([leader], 2)
    other.down = True
    plans, clock = on_a_clock()
    pipe = pipeline([leader, other], plans, choice=BotStreams(OneBot()))
    pipe.drain(ALL)
    clock.now = PACE.unreadable_s + 1
    pipe.drain(ALL)
    assert (len(poison(pipe)), plans.gaps) == (1, {})
    pipe.start()
    (fresh,) = leader.say("a")
    pipe.drain(ALL)
    assert plans.gaps == {}
    assert pipe.ids("a")[-1] == fresh
    assert "a" in plans.streams
