"""The parts of a block stream (events, miniblocks, snapshots, cookies), how they are hashed and verified. No I/O.

A stream is a chain of numbered miniblocks plus a minipool of events not yet sealed. Every hash is SHA-256 over a
canonical text (`canonical`), which begins with the kind of thing hashed and its stream: no hash of one thing is the
hash of another. `docs/blocknode.md` is the specification.

The trap: a snapshot sums up everything up to *and including* the events of the miniblock that carries it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from evermark.errors import FormatError, GapError, IdentityError

GENESIS_PREVIOUS: Final = "0" * 64  # the previous hash of block 0
_T = TypeVar("_T")
_EVENT, _SNAPSHOT, _BLOCK = "evermark.event.1", "evermark.snapshot.1", "evermark.block.1"
_CANONICAL = json.JSONEncoder(ensure_ascii=False, sort_keys=True, separators=(",", ":"))
_HINT_LIE = "the node sent something else than was made: ask another node, and have this one's disk looked at"

Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Whole = Annotated[int, Field(ge=0, lt=2**53, strict=True)]
# The bound is that of a whole answer. It makes pydantic look into the text, and refuse half a surrogate pair.
Text = Annotated[str, Field(strict=True, max_length=64 * 1024 * 1024)]
_PLAIN: TypeAdapter[str | int] = TypeAdapter(Text | Whole)


def _plain(value: Any) -> Any:
    """Only what `canonical` can write in one way."""
    if isinstance(value, dict):
        return {_plain(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else _PLAIN.validate_python(value)


class UnreadableError(FormatError):
    """A sound block has an event that cannot be read, and not every node could be asked for it."""

    def __init__(self, message: str, *, block: int, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.block = block


class StreamKind(StrEnum):
    CHANNEL = "channel"
    DIRECT = "direct"
    INBOX = "inbox"


class EventKind(StrEnum):
    MESSAGE = "message"
    JOIN = "join"
    LEAVE = "leave"
    SETTINGS = "settings"


@dataclass(frozen=True, slots=True)
class Cookie:
    """How far a reader is: it has every miniblock below `minipool_gen`, the last of which had this hash."""

    minipool_gen: Whole
    prev_miniblock_hash: Hash

    def wire(self) -> dict[str, Any]:
        return {"minipool_gen": self.minipool_gen, "prev_miniblock_hash": self.prev_miniblock_hash}


START: Final = Cookie(0, GENESIS_PREVIOUS)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """One event of a stream. `member` is set for joins and leaves, `settings` (None removes one) for settings."""

    hash: Hash
    kind: EventKind
    creator: Text
    at_us: Whole  # when it was made, by its maker's clock
    nonce: Text  # tells two otherwise equal events apart
    payload: Text = ""
    member: Text = ""
    settings: Mapping[Text, Text | None] = field(default_factory=dict)
    tags: Annotated[Mapping[str, Any], BeforeValidator(_plain)] = field(default_factory=dict)

    def wire(self) -> dict[str, Any]:
        """Fields that are empty are left out."""
        said: dict[str, Any] = {
            "hash": self.hash,
            "kind": str(self.kind),
            "creator": self.creator,
            "at_us": self.at_us,
            "nonce": self.nonce,
        }
        optional = {"member": self.member, "settings": self.settings, "tags": self.tags, "payload": self.payload}
        said.update((name, value) for name, value in optional.items() if value)
        return said


@dataclass(frozen=True, slots=True)
class Undecoded(BlockEvent):
    """An event that this program cannot read, kept as it came. Its block vouches for its hash and its place in the
    block; the other fields mean nothing."""

    raw: bytes = b""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Members and settings of the stream after the block that carries the snapshot. `incarnation` is drawn anew each
    time a stream is created: a recreated stream has another chain from its first block on."""

    kind: StreamKind
    creator: Text
    incarnation: Annotated[Text, Field(pattern=r"^[^/\x00]*$")]  # State puts a word and a slash before some
    members: tuple[Text, ...]  # sorted
    settings: Mapping[Text, Text]

    def wire(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind),
            "creator": self.creator,
            "incarnation": self.incarnation,
            "members": list(self.members),
            "settings": dict(sorted(self.settings.items())),
        }


@dataclass(frozen=True, slots=True)
class Block:
    stream: str
    number: Whole
    previous: Hash
    hash: Hash
    at_us: Whole
    event_hashes: tuple[Hash, ...]
    snapshot: Snapshot | None
    events: tuple[BlockEvent, ...]

    @property
    def cookie(self) -> Cookie:
        """The cookie of a reader that has this block."""
        return Cookie(self.number + 1, self.hash)

    def header(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "previous": self.previous,
            "hash": self.hash,
            "at_us": self.at_us,
            "event_hashes": list(self.event_hashes),
            "snapshot": self.snapshot.wire() if self.snapshot else None,
        }

    def wire(self) -> dict[str, Any]:
        return {"header": self.header(), "events": [event.wire() for event in self.events]}


def canonical(value: Any) -> bytes:
    """JSON as RFC 8785 writes it; strings, integers, lists, objects and null only, keys sorted by code point."""
    return _CANONICAL.encode(value).encode()


def _hash(value: Any) -> str:
    return hashlib.sha256(canonical(value)).hexdigest()


def event_hash(stream: str, event: BlockEvent) -> str:
    """The right value of `event.hash`."""
    settings, tags = dict(event.settings), dict(event.tags)
    return _hash(
        [
            _EVENT, stream, str(event.kind), event.creator, event.at_us, event.nonce, event.member, settings, tags,
            event.payload,
        ]
    )  # fmt: skip


def snapshot_hash(stream: str, snapshot: Snapshot) -> str:
    said = snapshot.wire()
    names = ("kind", "creator", "incarnation", "members", "settings")
    return _hash([_SNAPSHOT, stream, *(said[name] for name in names)])


def block_hash(
    stream: str, number: int, previous: str, at_us: int, event_hashes: Iterable[str], snapshot: Snapshot | None
) -> str:
    summed = snapshot_hash(stream, snapshot) if snapshot is not None else None
    return _hash([_BLOCK, stream, number, previous, at_us, list(event_hashes), summed])


def make_event(
    stream: str,
    kind: EventKind,
    creator: str,
    *,
    at_us: int,
    nonce: str,
    payload: str = "",
    member: str = "",
    settings: Mapping[str, str | None] | None = None,
    tags: Mapping[str, Any] | None = None,
) -> BlockEvent:
    """An event with its hash."""
    fields = (kind, creator, at_us, nonce, payload, member, settings or {}, tags or {})
    return BlockEvent(event_hash(stream, BlockEvent("", *fields)), *fields)


def make_block(
    stream: str, after: Cookie, at_us: int, events: Iterable[BlockEvent], snapshot: Snapshot | None
) -> Block:
    """The block that follows `after`, with its hash."""
    taken = tuple(events)
    hashes = tuple(event.hash for event in taken)
    number, previous = after.minipool_gen, after.prev_miniblock_hash
    made = block_hash(stream, number, previous, at_us, hashes, snapshot)
    return Block(stream, number, previous, made, at_us, hashes, snapshot, taken)


def verify_event(stream: str, event: BlockEvent) -> None:
    """Raise FormatError unless the event's content has its hash; unreadable events are passed."""
    if isinstance(event, Undecoded):
        return
    if event_hash(stream, event) != event.hash:
        raise FormatError(
            f"stream {stream}: event {event.hash[:16]}… does not have the content its hash says", hint=_HINT_LIE
        )


def verify_block(block: Block, previous_hash: str | None) -> None:
    """Raise unless the block's content has its hash and follows the block with `previous_hash`.

    None: the block before is not known (an answer that begins at a snapshot). FormatError: header, events or snapshot
    are not what was hashed. IdentityError: a sound block of another chain: a fork, or a recreated stream.
    """
    where = f"stream {block.stream}, block {block.number}"
    if tuple(event.hash for event in block.events) != block.event_hashes:
        raise FormatError(f"{where}: its events are not those its header names", hint=_HINT_LIE)
    for event in block.events:
        verify_event(block.stream, event)
    made = block_hash(block.stream, block.number, block.previous, block.at_us, block.event_hashes, block.snapshot)
    if made != block.hash:
        raise FormatError(f"{where}: its header does not have the content its hash says", hint=_HINT_LIE)
    if (block.number == 0) != (block.previous == GENESIS_PREVIOUS):
        raise FormatError(f"{where}: only block 0 begins a chain", hint=_HINT_LIE)
    if block.number == 0 and block.snapshot is None:
        raise FormatError(f"{where}: block 0 has no snapshot", hint=_HINT_LIE)
    if previous_hash is not None and block.previous != previous_hash:
        raise IdentityError(
            f"{where}: it follows {block.previous[:16]}…, not {previous_hash[:16]}…: this is another chain",
            hint="the stream was recreated, or the node's history was rewritten: compare block 0 with another node's",
        )


def verify_chain(blocks: Iterable[Block], after: Cookie | None) -> Cookie | None:
    """Verify that the blocks follow `after` without a gap; None: from wherever they start. The cookie after them.

    GapError (not its subclass IdentityError): a block is missing. The other errors are the errors of `verify_block`.
    """
    at = after
    for block in blocks:
        if at is not None and block.number != at.minipool_gen:
            raise GapError(
                f"stream {block.stream}: block {block.number} came where {at.minipool_gen} is due",
                hint="ask again, or another node: a page must hold every block of its range",
            )
        verify_block(block, at.prev_miniblock_hash if at is not None else None)
        at = block.cookie
    return at


def sum_up(members: set[str], settings: dict[str, str], events: Iterable[BlockEvent]) -> None:
    """Apply joins, leaves and settings, in place. Applying the same events again changes nothing."""
    for event in events:
        if event.kind is EventKind.JOIN:
            members.add(event.member)
        elif event.kind is EventKind.LEAVE:
            members.discard(event.member)
        elif event.kind is EventKind.SETTINGS:
            for name, value in event.settings.items():
                if value is None:
                    settings.pop(name, None)
                else:
                    settings[name] = value


def event_from(wire: Any) -> BlockEvent:
    """An event as it came over the wire, not yet verified."""
    return _read(_EVENTS, "an event", wire)


def event_or_raw(wire: Any, named: str = "") -> BlockEvent:
    """An event as it came over the wire; an unreadable event in its raw form, under the hash `named` by its block."""
    try:
        return event_from(wire)
    except FormatError as error:
        raw = json.dumps(wire, ensure_ascii=True, separators=(",", ":")).encode()
        return Undecoded(named, EventKind.MESSAGE, "", 0, "", raw=raw, reason=error.message)


def block_from(wire: Any, stream: str, *, raw: bool = False) -> Block:
    """A block as it came over the wire, not yet verified; `raw`: with events that cannot be read, as they came."""
    what = f"a block of stream {stream}"
    sent = _read(_SENT_BLOCKS, what, wire)
    hashes = sent.header.get("event_hashes")
    named = hashes if isinstance(hashes, list) else []
    if len(named) != len(sent.events):  # found before anything of an event is kept: they may be a million
        raise FormatError(f"{what}: its events are not those its header names", hint=_HINT_LIE)
    pairs = zip(sent.events, named, strict=True)
    events = tuple(event_or_raw(event, name) if raw else event_from(event) for event, name in pairs)
    return _read(_BLOCKS, what, {**sent.header, "stream": stream, "events": events})


def cookie_from(wire: Any) -> Cookie:
    return _read(_COOKIES, "a cookie", wire)


@dataclass(frozen=True, slots=True)
class _SentBlock:
    header: dict[str, Any]
    events: list[Any]


_EVENTS, _COOKIES, _BLOCKS = TypeAdapter(BlockEvent), TypeAdapter(Cookie), TypeAdapter(Block)
_SENT_BLOCKS = TypeAdapter(_SentBlock)


def _read(adapter: TypeAdapter[_T], what: str, wire: Any) -> _T:
    """Any wrong shape of a document is a `FormatError`."""
    try:
        return adapter.validate_python(wire)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        unknown = f", not {first['input']!r}" if first["type"] == "enum" else ""  # other values may be secret
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}{unknown}"[:200]
    except RecursionError as error:
        said = str(error)
    hint = "the node may be newer than this program: update it"
    raise FormatError(f"{what} is not in the format ({said})", hint=hint)
