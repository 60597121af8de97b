"""The bodies of requests to a node, as models with bounds. Answers are built from stored text, without models."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from evermark.blocknode.refusal import Code, Refused, bad_request
from evermark.blocknode.settings import EVENTS_IN_ADD_MAX, STREAMS_IN_ASK_MAX
from evermark.sources.blocks.chain import BlockEvent, Cookie, EventKind, Hash, StreamKind, Whole, event_hash

STREAM_ID_CHARS_MAX = 128
STREAM_ID = rf"^[A-Za-z0-9][A-Za-z0-9._:@-]{{0,{STREAM_ID_CHARS_MAX - 1}}}$"

_WIRE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
SettingValue = Annotated[str, StringConstraints(max_length=4096)]


class Asked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


_T = TypeVar("_T", bound=Asked)


class CreateAsked(Asked):
    kind: StreamKind
    creator: Name
    members: Annotated[list[Name], Field(max_length=10_000)] = []
    settings: Annotated[dict[Name, SettingValue], Field(max_length=100)] = {}

    @model_validator(mode="after")
    def _members_fit_the_kind(self) -> Self:
        if len(set(self.members)) != len(self.members):
            raise ValueError("a member stands twice")
        if self.kind is StreamKind.DIRECT and len(self.members) != 2:
            raise ValueError("a direct stream has exactly two members")
        if self.kind is StreamKind.INBOX and len(self.members) != 1:
            raise ValueError("an inbox has exactly one member, its owner")
        return self


class PointedAt(Asked):
    """Another event of the stream, and its creator: so that a reader knows whether its own event was answered."""

    event: Hash
    user: Name


class Command(Asked):
    app: Name
    name: Name


class Tags(Asked):
    mentions: Annotated[list[Name], Field(min_length=1, max_length=100)] | None = None
    reply: PointedAt | None = None
    reaction: PointedAt | None = None
    command: Command | None = None
    session: Name | None = None  # the key its payload is encrypted with


class EventAsked(Asked):
    hash: Hash | None = None
    kind: EventKind
    creator: Name
    at_us: Whole
    nonce: Name
    payload: str = ""
    member: Name | None = None
    settings: Annotated[dict[Name, SettingValue | None], Field(min_length=1, max_length=100)] | None = None
    tags: Tags | None = None

    @model_validator(mode="after")
    def _fields_fit_the_kind(self) -> Self:
        if (self.member is not None) != (self.kind in {EventKind.JOIN, EventKind.LEAVE}):
            raise ValueError("`member` belongs to join and leave, and to nothing else")
        if (self.settings is not None) != (self.kind is EventKind.SETTINGS):
            raise ValueError("`settings` belong to the kind settings, and to nothing else")
        return self


class AddAsked(Asked):
    events: Annotated[list[EventAsked], Field(min_length=1, max_length=EVENTS_IN_ADD_MAX)]


class CookieAsked(Asked):
    minipool_gen: Whole
    prev_miniblock_hash: Hash

    def cookie(self) -> Cookie:
        return Cookie(self.minipool_gen, self.prev_miniblock_hash)


StreamId = Annotated[str, StringConstraints(pattern=STREAM_ID)]
Cookies = Annotated[dict[StreamId, CookieAsked | None], Field(max_length=STREAMS_IN_ASK_MAX)]


class SyncAsked(Asked):
    streams: Cookies = {}


class SyncChangeAsked(Asked):
    add: Cookies = {}
    remove: Annotated[list[StreamId], Field(max_length=STREAMS_IN_ASK_MAX)] = []


def parsed(model: type[_T], body: bytes) -> _T:
    """The body as the model says, or a refusal that names the first thing that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:200]
        raise bad_request(f"{where or 'the body'}: {first['msg']}"[:400]) from None


def event_of(stream: str, asked: EventAsked, bytes_max: int) -> tuple[BlockEvent, bytes]:
    """The event with its hash, and its text as it is stored and sent. Refused: too large, or not of the given hash."""
    tags = {} if asked.tags is None else asked.tags.model_dump(exclude_none=True)
    rest = (asked.payload, asked.member or "", asked.settings or {}, tags)
    bare = BlockEvent("", asked.kind, asked.creator, asked.at_us, asked.nonce, *rest)
    made = event_hash(stream, bare)
    if asked.hash is not None and asked.hash != made:
        hint = "hash it as docs/blocknode.md says, with the id of this stream; or leave the hash out"
        raise Refused(Code.HASH_MISMATCH, f"the event's hash is {made}, not {asked.hash}", hint)
    event = replace(bare, hash=made)
    text = text_of(event.wire())
    if len(text) > bytes_max:
        said = f"the event has {len(text)} bytes, at most {bytes_max}"
        raise Refused(Code.TOO_LARGE, said, "send a reference to it instead")
    return event, text


def text_of(value: Any) -> bytes:
    """JSON for the wire: fields in the order given, no spaces."""
    return _WIRE.encode(value).encode()
