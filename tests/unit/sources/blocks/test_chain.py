"""The format of block streams: whatever was changed, left out or put in place of a block is found."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.error_policy import Action, action_for
from evermark.errors import FormatError, GapError, IdentityError
from evermark.sources.blocks import chain
from evermark.sources.blocks.chain import (
    GENESIS_PREVIOUS,
    START,
    Block,
    BlockEvent,
    Cookie,
    EventKind,
    Snapshot,
    StreamKind,
    block_from,
    canonical,
    cookie_from,
    event_from,
    make_block,
    make_event,
    sum_up,
    verify_block,
    verify_chain,
    verify_event,
)

STREAM = "channel-1"
LETTERS = 'abé"\\/\n\x00\u2028𝄞'


def name(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(1, 4)))


def some_event(rng: random.Random) -> BlockEvent:
    kind = rng.choice(list(EventKind))
    tags = {"mentions": [name(rng)], "reply": {"event": "0" * 64, "user": name(rng)}} if rng.random() < 0.5 else {}
    more: dict[str, Any] = {"payload": rng.choice(["", name(rng)]), "tags": tags}
    if kind in {EventKind.JOIN, EventKind.LEAVE}:
        more["member"] = name(rng)
    if kind is EventKind.SETTINGS:
        more["settings"] = {name(rng): rng.choice([None, "", name(rng)])}
    return make_event(STREAM, kind, name(rng), at_us=rng.randrange(2**53), nonce=name(rng), **more)


def some_chain(rng: random.Random) -> list[Block]:
    """Two blocks at least, the first with a snapshot, the others with events and sometimes one."""
    members, settings = {"alice"}, {"title": "x"}
    incarnation = rng.randbytes(8).hex()
    blocks: list[Block] = []
    for number in range(rng.randint(2, 5)):
        taken = [some_event(rng) for _ in range(rng.randint(1, 3))] if number else []
        sum_up(members, settings, taken)
        snapshot = None
        if number == 0 or rng.random() < 0.5:
            snapshot = Snapshot(StreamKind.CHANNEL, "alice", incarnation, tuple(sorted(members)), dict(settings))
        after = blocks[-1].cookie if blocks else START
        blocks.append(make_block(STREAM, after, number, taken, snapshot))
    return blocks


# From a seed, which a failure prints: drawing each letter by itself takes a hundred times as long.
randoms = st.integers(0, 2**32).map(random.Random)
chains = randoms.map(some_chain)


def over_the_wire(block: Block) -> Block:
    return block_from(json.loads(json.dumps(block.wire())), STREAM)


def test_the_hashes_are_the_documented_ones() -> None:
    """GIVEN the examples of docs/blocknode.md WHEN they are hashed by hand THEN it is what the code says, for ever."""
    event = make_event(
        "room", EventKind.MESSAGE, "alice", at_us=5, nonce="n", payload='{"text":"hé"}', tags={"mentions": ["bob"]}
    )
    text = '["evermark.event.1","room","message","alice",5,"n","",{},{"mentions":["bob"]},"{\\"text\\":\\"hé\\"}"]'
    assert event.hash == hashlib.sha256(text.encode()).hexdigest()
    snapshot = Snapshot(StreamKind.CHANNEL, "alice", "i", ("alice", "bob"), {"b": "2", "a": "1"})
    summed = '["evermark.snapshot.1","room","channel","alice","i",["alice","bob"],{"a":"1","b":"2"}]'
    inner = hashlib.sha256(summed.encode()).hexdigest()
    block = make_block("room", START, 7, [event], snapshot)
    text = f'["evermark.block.1","room",0,"{GENESIS_PREVIOUS}",7,["{event.hash}"],"{inner}"]'
    assert block.hash == hashlib.sha256(text.encode()).hexdigest()
    assert block.hash == "052220b8ae71a08a3325fd47175adf4c9eaf8df6b116ae29865dac6120f2debd"


@given(chains)
def test_a_chain_survives_the_wire_and_verifies(blocks: list[Block]) -> None:
    """GIVEN any chain WHEN it was sent as JSON THEN it is the same and verifies, from the start or from anywhere."""
    came = [over_the_wire(block) for block in blocks]
    assert came == blocks
    assert verify_chain(came, START) == blocks[-1].cookie
    assert verify_chain(came[1:], blocks[0].cookie) == blocks[-1].cookie
    assert verify_chain(came[1:], None) == blocks[-1].cookie
    assert verify_chain([], START) == START
    assert cookie_from(json.loads(json.dumps(blocks[-1].cookie.wire()))) == blocks[-1].cookie


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document that holds a plain value."""
    if isinstance(value, dict):
        return [leaf for name, item in value.items() for leaf in _leaves(item, (*path, name))]
    if isinstance(value, list):
        return [leaf for at, item in enumerate(value) for leaf in _leaves(item, (*path, at))]
    return [path]


@given(chains, st.data())
def test_no_value_of_a_block_can_be_changed_unseen(blocks: list[Block], data: st.DataObject) -> None:
    """GIVEN a chain WHEN any one value anywhere in it is another one THEN verification says so."""
    at = data.draw(st.integers(0, len(blocks) - 1))
    wire = json.loads(json.dumps(blocks[at].wire()))
    path = data.draw(st.sampled_from(_leaves(wire)))
    place = wire
    for step in path[:-1]:
        place = place[step]
    old = place[path[-1]]
    place[path[-1]] = (
        old + 1 if isinstance(old, int) else ("x" if old is None else f"{old}x" if old == "" else _other(old))
    )
    with pytest.raises((FormatError, GapError)) as caught:
        verify_chain([*blocks[:at], block_from(wire, STREAM), *blocks[at + 1 :]], START)
    assert action_for(caught.value) is Action.STOP


def _other(text: str) -> str:
    return ("0" if text[0] != "0" else "1") + text[1:]


@given(chains, st.data())
def test_no_event_can_be_added_removed_or_moved_unseen(blocks: list[Block], data: st.DataObject) -> None:
    """GIVEN a block WHEN events are missing, doubled or swapped THEN verification says so, header adapted or not."""
    block = blocks[data.draw(st.integers(1, len(blocks) - 1))]
    changed = data.draw(st.sampled_from([block.events[1:], (*block.events, block.events[0])]))
    for hashes in (block.event_hashes, tuple(event.hash for event in changed)):
        with pytest.raises(FormatError):
            verify_block(replace(block, events=changed, event_hashes=hashes), block.previous)


@given(chains, st.data())
def test_a_missing_block_is_a_gap_and_a_fork_is_another_identity(blocks: list[Block], data: st.DataObject) -> None:
    """GIVEN a chain WHEN a block is left out it is a gap, WHEN one of another chain stands there it is a fork."""
    missing = data.draw(st.integers(0, len(blocks) - 2))
    with pytest.raises(GapError) as gap:
        verify_chain(blocks[:missing] + blocks[missing + 1 :], START)
    assert not isinstance(gap.value, IdentityError)
    at = data.draw(st.integers(1, len(blocks) - 1))
    real = blocks[at]
    forked = make_block(STREAM, Cookie(real.number, "f" * 64), real.at_us, real.events, real.snapshot)
    with pytest.raises(IdentityError):
        verify_chain([*blocks[:at], forked], START)


@given(chains)
def test_a_block_of_another_stream_is_not_taken(blocks: list[Block]) -> None:
    """GIVEN a sound block WHEN it is passed off as one of another stream THEN neither it nor its events verify."""
    with pytest.raises(FormatError):
        verify_block(replace(blocks[0], stream="channel-2"), GENESIS_PREVIOUS)
    with pytest.raises(FormatError):
        verify_event("channel-2", blocks[1].events[0])


def test_only_block_0_begins_a_chain_and_it_has_a_snapshot() -> None:
    """GIVEN hashes that are right WHEN a chain begins elsewhere or without a snapshot THEN it is no chain."""
    late = make_block(STREAM, Cookie(3, GENESIS_PREVIOUS), 0, [], None)
    bare = make_block(STREAM, START, 0, [], None)
    for block in (late, bare):
        with pytest.raises(FormatError):
            verify_block(block, None)


@given(randoms, st.integers(0, 8), st.integers(0, 8))
def test_summing_up_events_again_changes_nothing(rng: random.Random, count: int, again: int) -> None:
    """GIVEN a snapshot that includes a block WHEN its events are applied to it once more THEN it is the same."""
    taken = [some_event(rng) for _ in range(count)]
    members, settings = {"alice"}, {"title": "x"}
    sum_up(members, settings, taken)
    once = set(members), dict(settings)
    sum_up(members, settings, taken[-again:] if again else [])
    assert (members, settings) == once


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["header", "events", "hash"]), inner),
    max_leaves=8,
)


@given(junk)
def test_what_is_not_in_the_format_is_one_kind_of_error(value: Any) -> None:
    """GIVEN anything a node may send WHEN it is no block THEN it is a FormatError, never a crash."""
    for read in (lambda: block_from(value, STREAM), lambda: event_from(value), lambda: cookie_from(value)):
        with pytest.raises(FormatError):
            read()


@pytest.mark.parametrize("wrong", [1.5, 2**53, -1, True, None, "\ud800", {"deep": 0.5}])
def test_values_that_have_no_canonical_text_are_refused(wrong: Any) -> None:
    """GIVEN an event with a value that canonical JSON writes in no or two ways WHEN it is read THEN it is refused."""
    event = make_event(STREAM, EventKind.MESSAGE, "alice", at_us=1, nonce="n").wire()
    with pytest.raises(FormatError):
        event_from(event | {"tags": {"x": wrong}})


def test_canonical_text_is_that_of_rfc_8785() -> None:
    """GIVEN control characters, quotes and non-ASCII WHEN they are written THEN escapes and order are as there."""
    value = {"b": 'é"\\/\u2028', "a": ["\u0000\u001f\b\n\r\t\f\x7f", 10, None]}
    said = '{"a":["\\u0000\\u001f\\b\\n\\r\\t\\f\x7f",10,null],"b":"é\\"\\\\/\u2028"}'
    assert canonical(value) == said.encode()


@pytest.mark.parametrize("hashes", [None, [], ["0" * 64]], ids=["none", "no hash", "one hash"])
def test_events_that_no_header_names_are_refused_before_any_is_kept(
    hashes: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a block with many events that are none WHEN its header names fewer THEN it is refused, and no event was
    looked at: each would be kept with the reason why it cannot be read."""
    looked: list[object] = []
    monkeypatch.setattr(chain, "event_or_raw", lambda *event: looked.append(event))
    with pytest.raises(FormatError, match="header names"):
        block_from({"header": {"number": 1, "event_hashes": hashes}, "events": [1] * 1000}, STREAM, raw=True)
    assert looked == []
