"""D11: which events of its streams a bot is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from evermark.delivery.bots.forward import forwarded, forwards, session_of, waiting
from evermark.delivery.model import BotMode, BotSpec, BotView, Stay
from evermark.event import EVENT

WISH = BotSpec("chat", "bot", device="phone")
MENTIONS = replace(WISH, mode=BotMode.MENTIONS_REPLIES_REACTIONS)
NONE = replace(WISH, mode=BotMode.NONE)


def said(kind: str = "message", creator: str = "alice", member: str = "", **tags: Any) -> dict[str, Any]:
    return {"kind": kind, "creator": creator, **({"member": member} if member else {}), "tags": tags, "payload": "x"}


PLAIN = said()
OWN = said(creator="bot")
MENTIONED = said(mentions=["carol", "bot"])
REPLY = said(reply={"event": "h", "user": "bot"})
REACTION = said(reaction={"event": "h", "user": "bot"})
REPLY_TO_ANOTHER = said(reply={"event": "h", "user": "carol"}, mentions=["carol"])
COMMAND = said(command={"app": "bot", "name": "forecast"})
COMMAND_TO_ANOTHER = said(command={"app": "other", "name": "forecast"}, mentions=["bot"])
JOINED = said("join", member="bot")
ANOTHER_JOINED = said("join", member="carol")
LEFT = said("leave", member="bot")
SETTINGS = said("settings")


@pytest.mark.parametrize(
    ("event", "all_", "mentions", "none", "inbox_of_none"),
    [
        (PLAIN, True, False, False, True),
        (OWN, False, False, False, False),
        (MENTIONED, True, True, False, True),
        (REPLY, True, True, False, True),
        (REACTION, True, True, False, True),
        (REPLY_TO_ANOTHER, True, False, False, True),
        (COMMAND, True, True, False, True),
        (COMMAND_TO_ANOTHER, False, False, False, False),
        (JOINED, True, True, False, False),
        (ANOTHER_JOINED, False, False, False, False),
        (LEFT, True, True, False, False),
        (SETTINGS, False, False, False, False),
        ("not an object", False, False, False, False),
        ({"kind": "message", "creator": "alice", "tags": ["odd"]}, True, False, False, True),
    ],
)
def test_d11_a_bot_is_sent_what_its_mode_says(
    event: object, all_: bool, mentions: bool, none: bool, inbox_of_none: bool
) -> None:
    """GIVEN any kind of event WHEN judged by mode THEN it goes to whom the table in `forward` names alone."""
    found = [forwards(wish, "message", event, member=True, inbox=False) for wish in (WISH, MENTIONS, NONE)]
    assert found == [all_, mentions, none]
    assert forwards(NONE, "message", event, member=True, inbox=True) is inbox_of_none


def test_d11_only_members_are_sent_messages() -> None:
    """GIVEN a stream the bot is not in THEN no message of it comes, not even a mention or a command."""
    for event in (PLAIN, MENTIONED, COMMAND):
        assert not forwards(WISH, "message", event, member=False, inbox=False)
    assert forwards(WISH, "message", JOINED, member=False, inbox=False)


def test_what_happened_to_a_stream_is_told_to_its_members() -> None:
    """GIVEN a note that a stream is deleted THEN members are told in any mode but none; rows are not sent."""
    note = {"change": "deleted", "was": "x"}
    assert forwards(MENTIONS, "truncate", note, member=True, inbox=False)
    assert not forwards(NONE, "truncate", note, member=True, inbox=False)
    assert not forwards(WISH, "truncate", note, member=False, inbox=False)
    assert not forwards(WISH, "insert", PLAIN, member=True, inbox=False)


def rows(*given: tuple[str, int, str, object]) -> pa.RecordBatch:
    made = [
        {
            "event_id": f"e{n}",
            "source": "chat",
            "partition": 0,
            "position": position,
            "batch": batch,
            "stream": stream,
            "op": "message",
            "ingested_at": 0,
            "payload": payload if isinstance(payload, str) else json.dumps(payload),
        }
        for n, (stream, batch, position, payload) in enumerate(given)
    ]
    return pa.RecordBatch.from_pylist(made, schema=EVENT)


def test_d3_within_a_batch_a_join_counts_from_its_own_position_on() -> None:
    """GIVEN a join and a leave inside one batch THEN what is between them is sent, and the two themselves."""
    stays = (Stay((7, "b"), (7, "e")),)
    view = BotView(WISH, frozenset({"always", "inbox"}), {"room": stays}, frozenset({"inbox"}))
    events = rows(
        ("room", 7, "a", PLAIN),
        ("room", 7, "b", JOINED),
        ("room", 7, "c", PLAIN),
        ("room", 7, "d", OWN),
        ("room", 7, "e", LEFT),
        ("room", 7, "f", PLAIN),
        ("room", 8, "a", PLAIN),
        ("always", 1, "a", PLAIN),
        ("inbox", 1, "a", PLAIN),
        ("elsewhere", 7, "c", MENTIONED),
        ("room", 7, "d2", "{broken"),
    )
    assert forwarded(events, view).column("event_id").to_pylist() == ["e1", "e2", "e4", "e7", "e8"]


def test_an_inbox_is_a_users_for_as_long_as_it_was_and_a_named_one_for_good() -> None:
    """GIVEN an inbox that became another's WHEN it goes on THEN nothing of it is sent; one that is named stays one."""
    stays = (Stay((1, "a"), (2, "a"), True),)
    events = rows(("mail", 1, "b", PLAIN), ("mail", 2, "b", PLAIN), ("mail", 3, "a", PLAIN))
    quiet = replace(WISH, mode=BotMode.NONE)
    view = BotView(quiet, frozenset(), {"mail": stays}, frozenset({"mail"}))
    assert forwarded(events, view).column("event_id").to_pylist() == ["e0"]
    named = replace(view, wish=replace(quiet, inbox="mail"))
    assert forwarded(events, named).column("event_id").to_pylist() == ["e0", "e1", "e2"]


@pytest.mark.parametrize("session", ["", "a\nb", "\x00", "s" * 1000, 7])
def test_d3_nothing_waits_for_a_key_that_cannot_be_published(session: object) -> None:
    """GIVEN a session whose name is none WHEN an event has it THEN it waits for nothing."""
    view = BotView(WISH, frozenset({"room"}))
    assert waiting(rows(("room", 1, "a", said(session=session))), view) == {}


def test_d3_events_of_sessions_that_are_not_clear_wait() -> None:
    """GIVEN a bot with a device THEN events with a session that is not clear wait; one without a device waits never."""
    view = BotView(WISH, frozenset({"room"}), clear=frozenset({"known"}))
    quoted = {"kind": "message", "creator": "alice", "payload": {"session": "known"}}
    events = rows(
        ("room", 1, "a", said(session="known")),
        ("room", 1, "b", said(session="new")),
        ("room", 1, "c", PLAIN),
        ("room", 1, "d", quoted),
        ("room", 1, "e", said(session=7)),
    )
    assert waiting(events, view) == {1: "new"}
    assert waiting(events, replace(view, wish=replace(WISH, device=""))) == {}
    assert session_of(said(session="s" * 1000)) == ""
