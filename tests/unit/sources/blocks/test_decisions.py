"""What is taken of a stream, case by case, and what a batch holds of it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import ConfigError, FormatError, GapError, IdentityError
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import (
    START,
    Cookie,
    EventKind,
    Snapshot,
    StreamKind,
    block_from,
    make_block,
    make_event,
)
from evermark.sources.blocks.decide.resume import Answer, Case, Room, StreamState, answer_from, decide, fitted
from evermark.sources.blocks.decide.ticks import EARLIEST, Item, Move, Position, Tick, partition_of, path, slices
from evermark.sources.blocks.read.rows import envelope
from evermark.sources.blocks.stream_choice import ChosenStreams
from evermark.sources.blocks.target import BlocksTarget
from simulator.blocks.node import ModelNode
from simulator.blocks.pipeline import PACE, Crash, pipeline
from simulator.blocks.plans import MemoryPlans

ALL = Limit(wait_s=0.0)


def _grown(blocks: int, *, page_blocks: int = 100, resume_blocks: int = 0) -> ModelNode:
    """A stream `a` with that many blocks after its first, one event each."""
    node = ModelNode(snapshot_every=4, page_blocks=page_blocks, resume_blocks=resume_blocks)
    node.create("a")
    for _ in range(blocks):
        node.say("a")
        node.seal("a")
    return node


def _known(node: ModelNode, gen: int, snapshot: int = 0) -> StreamState:
    it = node.streams["a"]
    return StreamState(snapshot, it.blocks[gen - 1].cookie, it.incarnation)


def test_case_a_the_same_snapshot_skips_what_was_taken() -> None:
    """B4: blocks below the generation are skipped, the rest is taken, then the minipool; nothing is fetched."""
    node = _grown(6)
    pooled = node.say("a", 2)
    found = decide(_known(node, 6, snapshot=4), node.view("a", None))
    assert (found.case, found.span) == (Case.SAME, 0)
    assert [block.number for block in found.blocks] == [6]
    assert [event.hash for event in found.pool] == pooled
    assert found.known.cookie == node.streams["a"].cookie


def test_case_b_blocks_before_a_newer_snapshot_are_fetched() -> None:
    """B5: exactly [gen, snapshot), and the answer after it."""
    node = _grown(9)
    found = decide(_known(node, 3), node.view("a", None))
    assert found.case is Case.GAP
    assert (found.start.minipool_gen, found.fetch_to.minipool_gen) == (3, 8)
    assert [block.number for block in found.blocks] == [8, 9]
    assert found.known.snapshot == 8


def test_a_generation_that_equals_the_snapshot_is_no_gap() -> None:
    """B5: an empty range is an error at the node; and a fork at this very place is seen."""
    node = _grown(9)
    found = decide(_known(node, 8, snapshot=4), node.view("a", None))
    assert (found.case, found.span) == (Case.SAME, 0)
    assert [block.number for block in found.blocks] == [8, 9]
    forked = replace(_known(node, 8, snapshot=4), cookie=Cookie(8, "f" * 64))
    with pytest.raises(IdentityError, match="fork"):
        decide(forked, node.view("a", None))


def test_case_c_an_older_snapshot_takes_nothing_twice() -> None:
    """B6: the node begins further back than we know; what it has beyond us is taken."""
    node = _grown(6)
    found = decide(replace(_known(node, 6), snapshot=5), node.view("a", None))
    assert found.case is Case.OLDER
    assert [block.number for block in found.blocks] == [6]


def test_case_c_a_node_with_less_than_was_taken_is_compared_with_the_log() -> None:
    """B6: its answer is taken, what the log has of it is dropped there; a follower is only behind."""
    node = _grown(9)
    known = _known(node, 10, snapshot=8)
    older = _grown(0)
    older.streams["a"] = replace(node.streams["a"], blocks=node.streams["a"].blocks[:6], snapshot=4)
    found = decide(known, older.view("a", None))
    assert (found.case, found.repeats) == (Case.REWOUND, True)
    assert (found.start, found.fetch_to.minipool_gen) == (START, 4)
    assert [block.number for block in found.blocks] == [4, 5]
    assert found.known.repeats_below > known.cookie.minipool_gen
    assert decide(known, older.view("a", None), follows=True).case is Case.BEHIND


def test_b6_an_event_made_before_a_restore_is_compared_with_the_log_whenever_it_comes() -> None:
    """GIVEN a stream whose node was restored WHEN it goes on THEN only events made before that are compared, and blocks
    that nobody has seen yet; the time is noted with the restore."""
    node = _grown(9)
    known = _known(node, 10, snapshot=8)
    older = _grown(0)
    older.streams["a"] = replace(node.streams["a"], blocks=node.streams["a"].blocks[:6], snapshot=4)
    assert decide(known, older.view("a", None), now_us=5).known.restored_us == 5
    (late,) = node.say("a", 1)
    made_us = node.streams["a"].pool[0].at_us
    for restored_us, repeats in ((0, False), (made_us - 1, False), (made_us, True), (10**15, True)):
        restored = replace(known, restored_us=restored_us)
        for cookie in (None, known.cookie):
            found = decide(restored, node.view("a", cookie))
            assert [event.hash for event in found.pool] == [late]
            assert (found.repeats, found.known.restored_us) == (repeats, restored_us)
    behind = _known(node, 2)
    assert not decide(behind, node.view("a", None)).repeats
    assert decide(replace(behind, restored_us=1), node.view("a", None)).repeats


def test_a_recreated_stream_is_taken_from_its_first_block() -> None:
    """B8: another incarnation is another stream, however long it is; a follower may only not know of it yet."""
    node, again = _grown(9), _grown(11)
    known = _known(node, 10, snapshot=8)
    found = decide(known, again.view("a", None))
    assert (found.case, found.start, found.repeats) == (Case.RECREATED, START, True)
    assert found.fetch_to.minipool_gen == 8
    assert decide(known, again.view("a", None), follows=True).case is Case.BEHIND


def test_the_first_sync_takes_all_or_begins_at_the_snapshot() -> None:
    """B8: as it was set."""
    node = _grown(9)
    whole = decide(None, node.view("a", None))
    assert (whole.case, whole.start, whole.fetch_to.minipool_gen) == (Case.FIRST, START, 8)
    assert decide(None, node.view("a", None), whole=False).span == 0


def test_a_fork_is_an_error() -> None:
    """B12: a sound chain that has another block where ours stands is never passed."""
    node = _grown(6)
    with pytest.raises(IdentityError, match="fork"):
        decide(replace(_known(node, 6, snapshot=4), cookie=Cookie(6, "f" * 64)), node.view("a", None))


def test_an_answer_without_blocks_is_an_error() -> None:
    """B3: the snapshot's position is the number of the first block."""
    with pytest.raises(FormatError, match="does not begin with a snapshot"):
        answer_from({"reset": True, "blocks": [], "minipool": [], "cookie": START.wire()}, "a", None)


def test_an_answer_that_says_more_and_leads_nowhere_is_an_error() -> None:
    """GIVEN an answer that continues from a cookie, holds nothing, and says that there is more THEN it is refused: the
    node would say the same for ever."""
    at = _grown(3).streams["a"].cookie
    wire = {"reset": False, "blocks": [], "minipool": [], "cookie": at.wire()}
    assert not answer_from(wire, "a", at).more
    with pytest.raises(FormatError, match="more"):
        answer_from({**wire, "more": True}, "a", at)


@pytest.mark.parametrize("kind", ["chan\0nel", "room", 5, ["channel"], None])
def test_a_kind_of_stream_that_is_none_is_an_error(kind: object) -> None:
    """GIVEN an answer whose kind is no kind THEN it is refused, before State is to keep a text that it cannot keep."""
    block = _grown(1).streams["a"].blocks[0]
    wire = {"reset": True, "blocks": [block.wire()], "cookie": block.cookie.wire(), "minipool": []}
    assert answer_from({**wire, "kind": "channel"}, "a", None).kind == "channel"
    with pytest.raises(FormatError, match="kind"):
        answer_from({**wire, "kind": kind}, "a", None)


@pytest.mark.parametrize("incarnation", ["fork accepted/abc", "abc\0"])
def test_an_incarnation_that_says_what_only_a_person_may_say_is_an_error(incarnation: str) -> None:
    """GIVEN an incarnation that State would read as an accepted fork, or could not keep THEN the block is refused."""
    snapshot = Snapshot(StreamKind.CHANNEL, "alice", incarnation, (), {})
    wire = make_block("a", START, 1, (), snapshot).wire()
    with pytest.raises(FormatError, match="incarnation"):
        block_from(wire, "a")


def test_a_minipool_that_is_never_sealed_is_refused_before_any_event_is_read() -> None:
    """GIVEN a minipool of more events than any node leaves unsealed THEN it is an error, however few can be read."""
    block = _grown(1).streams["a"].blocks[0]
    wire = {"reset": True, "blocks": [block.wire()], "cookie": block.cookie.wire()}
    assert answer_from({**wire, "minipool": [1] * 10}, "a", None).pool == ()
    with pytest.raises(FormatError, match="minipool"):
        answer_from({**wire, "minipool": [1] * 100_001}, "a", None)


@pytest.mark.parametrize("number", [10**12 - 2, 10**12 - 1, 10**13])
def test_a_block_that_has_no_position_makes_its_stream_stale(number: int) -> None:
    """GIVEN a stream whose blocks have numbers that no position can hold, taken from its snapshot on WHEN read THEN
    it is stale, and the others are taken; the last number that fits is taken."""
    node, plans = _grown(1), MemoryPlans()
    node.create("far")
    it = node.streams["far"]
    it.blocks = [make_block("far", Cookie(number, "a" * 64), 1, (node.event("far"),), it.blocks[0].snapshot)]
    pipe = pipeline([node], plans, whole=False)
    pipe.step(ALL)
    assert pipe.ids("a") == node.hashes("a")[-len(pipe.ids("a")) :] != []
    fits = number < 10**12 - 1
    assert set(plans.gaps) == (set() if fits else {"far"})
    assert pipe.ids("far") == (node.hashes("far") if fits else [])


def test_an_event_of_the_minipool_is_left_out_in_whichever_batch_its_block_comes() -> None:
    """B11: also when other batches, and a node that shows less of the minipool, came in between."""
    node = _grown(2, resume_blocks=10)
    first = node.say("a")
    known = decide(_known(node, 3), node.view("a", None)).known
    hidden, node.streams["a"].pool = node.streams["a"].pool, []
    known = decide(known, node.view("a", None)).known  # a copy that does not have it yet
    node.streams["a"].pool = hidden
    second = node.say("a")
    found = decide(known, node.view("a", None))
    assert [event.hash for event in found.pool] == second
    node.seal("a")
    assert decide(found.known, node.view("a", None)).leave_out == {*first, *second}


@given(st.integers(0, 9), st.integers(0, 3), st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_what_fits_is_a_beginning_of_what_is_there(gen: int, pool: int, rows: int, blocks: int, first: bool) -> None:
    """A cut decision takes whole blocks in order, at least one if the batch is empty, and says that there is more."""
    node = _grown(9)
    node.say("a", pool)
    known = _known(node, gen) if gen else None
    whole = decide(known, node.view("a", None))
    part = fitted(whole, Room(rows, blocks), known, at_least_one=first)
    assert part.start == whole.start
    assert part.span <= whole.span
    assert not part.blocks or part.span == whole.span
    assert part.blocks == whole.blocks[: len(part.blocks)]
    assert not part.pool or part.blocks == whole.blocks
    assert part.known.cookie.minipool_gen == part.fetch_to.minipool_gen + len(part.blocks) or not whole.blocks
    assert part.more == ((part.span, len(part.blocks), len(part.pool)) != (whole.span, len(whole.blocks), pool))
    if first and whole.news:
        assert part.span or part.blocks or part.pool


def test_no_gap_no_fetch() -> None:
    """B16: after a restart with nothing missing, no block is asked for; the stream is asked from its snapshot."""
    node = _grown(6)
    pipe = pipeline([node])
    pipe.drain(ALL)
    node.pages.clear()
    node.cookies.clear()
    pipe.start()
    taken = node.say("a")
    pipe.drain(ALL)
    assert node.pages == []
    assert node.cookies[0] is None
    assert pipe.ids("a")[-1:] == taken


def test_a_gap_that_cannot_be_filled_holds_up_nobody_and_is_never_passed() -> None:
    """B10: the stream is stale, its state stays in front of the gap, the others go on; filled, nothing is missing."""
    node = _grown(3, page_blocks=2)
    node.create("b")
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    for _ in range(9):
        node.say("a")
        node.seal("a")
    node.lies.add(("a", 7))
    plans.patient = True
    said = node.say("b", 3)
    pipe.drain(ALL)
    assert pipe.ids("b") == said
    assert list(plans.gaps) == ["a"]
    known = plans.streams["a"][1].known
    assert known is not None
    assert known.cookie.minipool_gen <= 7
    node.lies.clear()
    plans.patient = False
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert plans.gaps == {}


def test_what_one_node_lies_about_is_asked_of_another() -> None:
    """B10, B12: a forged event is never taken, and costs nothing when somebody has the true one."""
    node = _grown(12, page_blocks=3)
    other = node.copied("two")
    node.lies |= {("a", 5), ("a", 12)}
    pipe = pipeline([node, other])
    pipe.drain(ALL)
    assert pipe.ids("a") == other.hashes("a")


def test_blocks_that_do_not_lead_to_where_they_should_are_not_taken() -> None:
    """B12: each block may follow the one before it, and the page may still be of a fork."""
    node = _grown(3)
    fork = node.copied("two")
    for each in (node, fork):
        for _ in range(6):
            each.say("a")
            each.seal("a")
    plans = MemoryPlans()
    plans.patient = True
    node.refusing = 10**6
    pipe = pipeline([node, fork], plans)
    pipe.drain(ALL)
    assert not set(pipe.ids("a")) & (set(fork.hashes("a")) - set(node.hashes("a")))
    assert "a" in plans.gaps
    node.refusing, plans.patient = 0, False
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")


def test_a_copy_that_does_not_know_of_a_recreation_changes_nothing() -> None:
    """B8: only a node that copies nobody can say that a stream is another one."""
    node = _grown(3)
    copied = node.copied("two")
    node.delete("a")
    node.create("a")
    node.say("a", 2)
    plans = MemoryPlans()
    pipe = pipeline([node, copied], plans)
    pipe.drain(ALL)
    before = dict(plans.streams)
    node.down = True
    copied.streams["a"].touched = node.streams["a"].touched + 1
    pipe.start()
    pipe.drain(ALL)
    assert plans.streams == before
    assert pipe.ids("a") == node.hashes("a")
    assert pipe.dropped == 0


def test_a_copy_that_has_less_does_not_end_what_was_begun_with_its_leader() -> None:
    """A batch held only a part; the listing is not read twice, so only the mark on the stream knows of the rest."""
    node = _grown(6)
    copied = node.copied("two")
    node.say("a")
    node.seal("a")
    node.say("a", 3)
    for count in (6, 9):
        pipe = pipeline([node, copied])
        pipe.step(Limit(rows_max=count, wait_s=0.0))
        node.down = True
        pipe.start()
        pipe.drain(ALL)
        copied.streams = node.copied("two").streams
        pipe.drain(ALL)
        assert pipe.ids("a") == node.hashes("a")
        node.down = False
        copied.streams["a"].blocks.pop()
        copied.streams["a"].pool = []


def test_one_stream_whose_blocks_nobody_gives_stops_no_plan() -> None:
    """B10: also when they are needed to make the plan; what cannot be had is stale, once it can it is not."""
    node = _grown(30, page_blocks=2)
    node.create("b")
    plans = MemoryPlans()
    plans.patient = True
    pipe = pipeline([node], plans)
    node.refusing = 10**6
    said = node.say("b", 2)
    pipe.drain(Limit(rows_max=5, wait_s=0.0))
    assert pipe.ids("b") == said
    assert list(plans.gaps) == ["a"]
    node.refusing, plans.patient = 0, False
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert plans.gaps == {}


def test_a_stale_stream_that_is_well_or_gone_is_not_looked_at_for_ever() -> None:
    """Its mark goes with the first look that finds nothing wrong."""
    node = _grown(2)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    plans.mark_stale(0, "a", 1, "it was not")
    plans.mark_stale(0, "never", 0, "it is not there")
    pipe.drain(ALL)
    assert plans.gaps == {}


def test_what_was_looked_through_is_remembered_for_its_boundary_alone() -> None:
    """A plan that was voided had events of streams which the listing, further on, does not name any more."""
    node = _grown(3)
    pipe = pipeline([node])
    found = pipe.source.latest(pipe.ends, ALL)
    assert pipe.source.latest(found, ALL) == found
    pipe.source.begin(0, pipe.ends[0])
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")


def test_sync_state_is_written_once_for_each_generation() -> None:
    """B2: an event in the minipool writes none, a block does."""
    node = _grown(1)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    for _ in range(3):
        node.say("a")
        pipe.drain(ALL)
    assert plans.writes == [("a", 2)]
    node.seal("a")
    pipe.drain(ALL)
    assert plans.writes == [("a", 2), ("a", 3)]


def test_an_owner_that_was_left_behind_changes_nothing() -> None:
    """Its plan leads nowhere any more, and it is told so instead of planning over what the other one took."""
    node = _grown(3)
    plans = MemoryPlans()
    late = pipeline([node], plans)
    end = late.source.latest(late.ends, ALL)[0]
    owner = pipeline([node], plans)
    node.say("a")
    owner.drain(ALL)
    assert owner.ids("a") == node.hashes("a")
    for call in (lambda: late.source.latest(late.ends, ALL), lambda: late.source.slices(0, EARLIEST, end)):
        with pytest.raises(GapError):
            call()


def test_a_late_owner_cannot_void_what_another_one_reads() -> None:
    """A plan under way stays readable, and what of it is logged is what gets confirmed."""
    node = _grown(3)
    plans = MemoryPlans()
    owner = pipeline([node], plans)
    found = owner.source.latest(owner.ends, ALL)
    node.say("a")
    late = pipeline([node], plans)  # starts, voids the plan, and makes another one
    late.source.latest(late.ends, ALL)
    rows = [r for s in owner.source.slices(0, EARLIEST, found[0]) for b in owner.source.read(s) for r in b.to_pylist()]
    owner.log[0], owner.ends = rows, found
    owner.source.confirm(0, found[0])
    owner.drain(ALL)
    assert owner.ids("a") == node.hashes("a")


def test_unwanted_streams_leave_no_trace_until_they_are_wanted() -> None:
    """B13: only what is wanted keeps state; a choice that changes is looked through anew."""
    node = _grown(3)
    node.create("b")
    said = node.say("b", 2)
    plans = MemoryPlans()
    pipe = pipeline([node], plans, choice=ChosenStreams(frozenset({"b"})))
    pipe.drain(ALL)
    assert list(plans.streams) == ["b"]
    assert pipe.ids("b") == said
    both = pipeline([node], plans, choice=ChosenStreams(frozenset({"a", "b"})))
    both.drain(ALL)
    assert both.ids("a") == node.hashes("a")
    assert both.ids("b") == []


def test_a_batch_that_is_full_leaves_the_others_for_the_next() -> None:
    """The listing is passed as far as it was looked at, and not further."""
    node = ModelNode()
    for stream in ("a", "b", "c"):
        node.create(stream)
        node.say(stream, 2)
    pipe = pipeline([node])
    pipe.drain(Limit(rows_max=1, wait_s=0.0))
    for stream in ("a", "b", "c"):
        assert pipe.ids(stream) == node.hashes(stream)


@pytest.mark.parametrize("what", ["settings", "tags", "members"])
def test_a_plan_carries_no_more_than_it_may_whatever_events_are_made_of(what: str) -> None:
    """GIVEN streams whose events have long settings or tags, or that have many members WHEN planned THEN what State has
    to keep of a batch is bounded by what a plan may carry, and by the last stream put into it."""
    long = "v" * 2000
    node, plans = ModelNode(snapshot_every=1), MemoryPlans()
    for n in range(40):
        stream = f"s{n}"
        node.create(stream, members=[f"{n}{long}" for n in range(2 if what == "members" else 0)])
        said: Any = {what: {"k": long}} if what != "members" else {}
        node.add(stream, make_event(stream, EventKind.SETTINGS, "a", at_us=1, nonce=str(n), **said))
    pace = replace(PACE, carried_bytes_max=20_000)
    pipe = pipeline([node], plans, pace=pace)
    while pipe.step(ALL, "unconfirmed"):
        pass
    for tick in plans.ticks(0):
        kept = sum(len(json.dumps(item.carried)) for item in plans.items(0, tick.ends))
        assert kept < 20_000 + 6_000
    for n in range(40):
        assert pipe.ids(f"s{n}") == node.hashes(f"s{n}")


def test_idle_streams_are_not_remembered() -> None:
    """B14: memory follows active streams; one that wakes up is taken from where it was left."""
    node = _grown(3)
    pipe = pipeline([node], idle_after_s=-1.0)
    pipe.drain(ALL)
    assert pipe.source.planner.tracked == 0
    node.say("a")
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")


def test_an_event_that_cannot_be_read_is_poison_with_its_bytes() -> None:
    """Invariant 9: once its block vouches for it, it is logged raw, naming its hash, and the stream goes on."""
    node = _grown(1, resume_blocks=10)
    odd = make_event("a", EventKind.MESSAGE, "alice", at_us=1, nonce="x")
    node.add("a", odd)
    node.seal("a")
    wire = odd.wire() | {"kind": "hologram"}
    pipe = pipeline([node])
    node.view = lambda stream, cookie: _told(node, wire)  # type: ignore[method-assign]
    pipe.step(ALL)
    poison = pipe.rows("a")[-1]
    said = json.loads(poison["payload"])
    assert (poison["op"], said["event"]) == ("poison", odd.hash)
    assert json.loads(poison["bytes"]) == wire
    assert "hologram" in said["reason"]


@pytest.mark.parametrize("lie", [{}, {"kind": "hologram"}], ids=["a hash alone", "another kind"])
def test_b12_what_a_node_shows_unreadable_in_its_minipool_is_taken_as_itself_later(lie: dict[str, str]) -> None:
    """GIVEN an event whose hash alone is shown WHEN it comes as itself THEN it is logged."""
    node = _grown(1, resume_blocks=10)
    real = make_event("a", EventKind.MESSAGE, "alice", at_us=1, nonce="x", payload="hello")
    node.add("a", real)
    pipe = pipeline([node])
    told = node.view
    node.view = lambda stream, cookie: _told(node, {"hash": real.hash} | lie)  # type: ignore[method-assign]
    pipe.drain(ALL)
    assert real.hash not in [row["event_id"] for row in pipe.rows("a")]
    node.view = told  # type: ignore[method-assign]
    node.seal("a")
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    assert {row["op"] for row in pipe.rows("a")} == {"schema", "message"}


def _told(node: ModelNode, event: dict[str, object]) -> Answer:
    """The whole of a stream, but for this event as it is given."""
    it = node.streams["a"]
    swapped = {event["hash"]: event}
    blocks = [block.wire() for block in it.blocks]
    for block in blocks:
        block["events"] = [swapped.get(each["hash"], each) for each in block["events"]]
    pool = [swapped.get(each.hash, each.wire()) for each in it.pool]
    view = {"reset": True, "kind": "channel", "cookie": it.cookie.wire(), "blocks": blocks, "minipool": pool}
    return answer_from(view, "a", None)


def test_a_payload_that_is_json_stays_json() -> None:
    """Filters look into it; what is no JSON is a text, and numbers that others would round are texts."""

    def told(payload: str) -> object:
        tags = {"mentions": ["bob"]}
        event = make_event("a", EventKind.MESSAGE, "alice", at_us=1, nonce="n", payload=payload, tags=tags)
        said = json.loads(envelope(event))
        assert (said["kind"], said["creator"], said["tags"]) == ("message", "alice", tags)
        return said["payload"]

    assert told('{"text": "hé", "n": [1.5, 7]}') == {"text": "hé", "n": [1.5, 7]}
    assert told('{"n": 9007199254740993, "m": -123456789012345678901234}') == {
        "n": "9007199254740993",
        "m": "-123456789012345678901234",
    }
    for odd in ("", "plain", "{broken", '{"n": NaN}', "[" * 5000):
        assert told(odd) == odd


def test_a_path_leads_from_what_was_confirmed_and_nowhere_else() -> None:
    """A boundary that nobody planned, or that was left behind, is an error and never an empty batch."""
    ticks = [Tick(0, 1, 0), Tick(1, 2, 0), Tick(1, 3, 0), Tick(3, 4, 0)]
    assert [tick.ends for tick in path(ticks, 0, 4)] == [1, 3, 4]
    assert path(ticks, 4, 4) == []
    for confirmed, to in ((2, 4), (5, 4), (0, 7)):
        with pytest.raises(GapError):
            path(ticks, confirmed, to)


def test_a_long_gap_is_many_slices_and_small_streams_share_one() -> None:
    """B9: disjoint, complete, in order; each of a size that is worth a task."""
    pins = tuple((at, f"{at:064x}") for at in range(0, 2001, 500))
    small = [Item(f"s{n}", carried=((0, 0, {}),), move=Move("channel", None)) for n in range(50)]
    made = list(slices(0, Tick(4, 7, 0), [*small, Item("long", pins), Item("last")]))
    assert len(made) == 4
    assert made[0].start == str(Position(4))
    assert made[-1].end == str(Position(7))
    assert all(a.end == b.start for a, b in pairwise(made))
    assert str(Position(6, 50, 500)) in {piece.start for piece in made}


def test_positions_are_text_in_order() -> None:
    """And whatever does not fit into one is an error, not a wrong order."""
    assert str(Position(3, 4, 5, 6)) < str(Position(3, 4, 50, 0)) < str(Position(3, 40)) < str(Position(4))
    assert Position.parse(str(Position(3, 4, 5, 6))) == Position(3, 4, 5, 6)
    for bad in ("", "1", str(Position(1)) + "0", str(Position(1)).replace("1", "x")):
        with pytest.raises(FormatError):
            Position.parse(bad)
    with pytest.raises(FormatError):
        str(Position(1, 0, 10**12))


def test_a_place_is_checked_before_anything_is_asked() -> None:
    """Bad addresses and numbers are named, without a token in the text."""
    good = ("chat", ("http://127.0.0.1:8330",), Plain("x"), "s")
    assert BlocksTarget(*good).partitions == 1
    for bad in (
        ("a/b", *good[1:]),
        (good[0], (), *good[2:]),
        (good[0], ("ftp://x",), *good[2:]),
        (good[0], ("http://user:pass@x",), *good[2:]),
    ):
        with pytest.raises(ConfigError) as refused:
            BlocksTarget(*bad)
        assert "pass" not in str(refused.value)
    with pytest.raises(ConfigError):
        BlocksTarget(*good, partitions=0)


def test_all_streams_of_a_name_are_in_one_partition_for_ever() -> None:
    """The share is part of the format: another hash would change the order of a stream's events."""
    assert [partition_of(stream, 4) for stream in ("a", "b", "room", "alice@x")] == [3, 1, 3, 3]


def test_a_log_that_was_set_back_is_filled_again_from_the_nodes() -> None:
    """GIVEN a log put back from a backup, and one that is gone WHEN begun there THEN what it lacks is taken, once."""
    node = _grown(5)
    pipe = pipeline([node])
    pipe.step(Limit(rows_max=2, wait_s=0.0))
    ends, rows = dict(pipe.ends), list(pipe.log[0])
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    pipe.ends, pipe.log = ends, {0: rows}
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")
    pipe.ends, pipe.log = {0: pipe.source.earliest(0)}, {}
    pipe.start()
    pipe.drain(ALL)
    assert pipe.ids("a") == node.hashes("a")


def test_looking_at_a_source_changes_nothing_of_its_plan() -> None:
    """GIVEN a batch that is planned WHEN somebody checks and asks how it is THEN it is read as it was planned."""
    node = _grown(3)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    end = pipe.source.latest(pipe.ends, ALL)
    other = pipeline([node], MemoryPlans()).source
    other._open_plans = lambda _: plans
    other._opened = None
    other.check(pipe.ends)
    other.condition()
    assert pipe.source.latest(pipe.ends, ALL) == end
    assert not any(tick.void for tick in plans.ticks(0))


def test_a_slice_whose_plan_is_gone_is_no_empty_slice() -> None:
    """GIVEN a slice under way WHEN its plan was thrown away by whoever began anew THEN reading it says so."""
    node = _grown(3)
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    end = pipe.source.latest(pipe.ends, ALL)[0]
    (piece,) = pipe.source.slices(0, pipe.ends[0], end)
    tick = next(iter(plans.all_ticks[0]))
    plans.all_ticks[0][tick] = (plans.all_ticks[0][tick][0], [])
    with pytest.raises(GapError, match="gone"):
        list(pipe.source.read(piece))


def _rewrite(node: ModelNode, blocks: int) -> None:
    """The node's history of `a` from that block on is another one, as long as before and longer."""
    it = node.streams["a"]
    kept, again = it.blocks[:blocks], [event for block in it.blocks[blocks:] for event in block.events]
    it.blocks, it.snapshot = kept, max(block.number for block in kept if block.snapshot is not None)
    for _ in range(3):
        node.say("a")
        node.seal("a")
    for event in again:  # what was taken once stands in other blocks now
        node.add("a", event)
        node.seal("a")


@pytest.mark.parametrize("snapshot_every", [4, 100])
def test_a_fork_is_passed_when_a_person_accepts_it_and_not_before(snapshot_every: int) -> None:
    """GIVEN a rewritten history WHEN it is accepted THEN what is new of it is taken once, and an event says so."""
    node = _grown(8)
    node.snapshot_every = snapshot_every
    plans = MemoryPlans()
    pipe = pipeline([node], plans)
    pipe.drain(ALL)
    old = pipe.ids("a")
    _rewrite(node, 5)
    for _ in range(3):
        pipe.start()
        pipe.drain(ALL)
    assert pipe.ids("a") == old
    assert plans.stale(0)["a"].fork
    pipe.source.accept_fork("a")
    for cut in ("planned", "read"):
        with pytest.raises(Crash):
            pipe.step(ALL, cut)
        pipe.start()
    pipe.drain(Limit(rows_max=2, wait_s=0.0))
    assert sorted(pipe.ids("a")) == sorted({*old, *node.hashes("a")})
    assert json.loads(pipe.notes("a")[0])["change"] == "fork accepted"
    assert plans.stale(0) == {}
    known = plans.known(["a"])["a"].known
    assert known is not None
    assert (known.cookie, known.fork_accepted) == (node.streams["a"].cookie, False)
    node.say("a", 2)
    pipe.drain(ALL)
    assert sorted(pipe.ids("a")) == sorted({*old, *node.hashes("a")})
