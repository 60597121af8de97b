"""Which events of its streams a bot is sent. Pure.

| event | goes to |
|---|---|
| an event the bot's own user made | no bot of that user |
| a join or leave | the bot it is about, in any mode but `none` |
| settings | no bot |
| a slash command | the app it addresses, in any mode but `none` |
| a message in the bot's inbox | the bot, in any mode |
| any other message | every member in mode `all`; with `mentions_replies_reactions` the members it concerns |
| a change of the stream as a whole (`truncate`) | its members, in any mode but `none` |

Memberships count where the event stands in the log: a user who joined later does not get it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from evermark.delivery.limits import SESSION_CHARS_MAX
from evermark.delivery.model import BotMode, BotSpec, BotView, Mark
from evermark.event import Op

_KEPT_MAX = 8_192
_KEPT_CHARS_MAX = 2_048


def forwards(wish: BotSpec, op: str, said: object, *, member: bool, inbox: bool) -> bool:
    """Whether a bot is sent one event. `said` is its payload; `member`: the user was a member at that event."""
    if op == Op.TRUNCATE:
        return inbox or (member and wish.mode is not BotMode.NONE)
    if op != Op.MESSAGE or not isinstance(said, Mapping) or said.get("creator") == wish.user:
        return False
    kind = said.get("kind")
    if kind in ("join", "leave"):
        return said.get("member") == wish.user and wish.mode is not BotMode.NONE
    if kind != "message" or not (member or inbox):
        return False
    tags = _part(said, "tags")
    if "command" in tags:
        return _part(tags, "command").get("app") == wish.user and (inbox or wish.mode is not BotMode.NONE)
    if inbox or wish.mode is BotMode.ALL:
        return True
    return wish.mode is BotMode.MENTIONS_REPLIES_REACTIONS and concerns(wish.user, tags)


def concerns(user: str, tags: Mapping[str, Any]) -> bool:
    """Whether an event mentions a user, or answers or reacts to an event of theirs."""
    mentions = tags.get("mentions")
    if isinstance(mentions, list) and user in mentions:
        return True
    return any(_part(tags, name).get("user") == user for name in ("reply", "reaction"))


def is_member(view: BotView, stream: str, at: Mark) -> bool:
    return stream in view.member or any(stay.covers(at) for stay in view.partly.get(stream, ()))


def forwarded(rows: pa.RecordBatch, view: BotView) -> pa.RecordBatch:
    """The rows of the log that a bot is sent, in their order."""
    names = ("stream", "op", "batch", "position", "payload")
    streams, ops, batches, positions, payloads = (rows.column(name).to_pylist() for name in names)
    kept = np.zeros(rows.num_rows, np.bool_)
    for n, stream in enumerate(streams):
        known = stream in view.inboxes
        if known or stream in view.member or stream in view.partly:
            member = is_member(view, stream, (batches[n], positions[n]))
            # An inbox named by the spec always counts; any other only while its user is a member.
            inbox = known and (member or stream == view.wish.inbox)
            kept[n] = forwards(view.wish, ops[n], parsed(payloads[n]), member=member, inbox=inbox)
    return rows if kept.all() else rows.filter(pa.array(kept))


def waiting(rows: pa.RecordBatch, view: BotView) -> dict[int, str]:
    """The rows that have to wait, each with the session whose key it waits for."""
    if not view.wish.device:
        return {}
    found: dict[int, str] = {}
    for n, payload in enumerate(rows.column("payload").to_pylist()):
        if payload is not None and '"session"' in payload:
            session = session_of(parsed(payload))
            if session and session not in view.clear:
                found[n] = session
    return found


def is_session(name: str) -> bool:
    """Whether a key can be published for this session name; an event of any other does not wait."""
    return 0 < len(name) <= SESSION_CHARS_MAX and name.isprintable()


def session_of(said: object) -> str:
    """The session whose key an event needs; empty: none."""
    session = _part(said, "tags").get("session") if isinstance(said, Mapping) else None
    return session if isinstance(session, str) and is_session(session) else ""


def parsed(payload: str | None) -> object:
    """A payload as JSON; None if it is not JSON. Not to be changed: several bots look at the same object."""
    if payload is None:
        return None
    return _kept(payload) if len(payload) <= _KEPT_CHARS_MAX else _loaded(payload)


def _loaded(payload: str) -> object:
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None


# Many bots may be in one stream, and each looks at all of its events.
_kept = lru_cache(maxsize=_KEPT_MAX)(_loaded)


def _part(said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = said.get(name)
    return found if isinstance(found, Mapping) else {}
