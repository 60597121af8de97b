"""The port of another replica: what two peers ask of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from evermark.errors import FormatError, GapError
from evermark.replicas.digests import Digest, RowDigest, Span
from evermark.replicas.event import NAME, Event
from evermark.replicas.members import Said
from evermark.replicas.paging import Coverage
from evermark.replicas.ranges import Held, held_as_json, held_from
from evermark.replicas.values import Table

PROTOCOL = 1
PROTOCOL_BY_TIME = 0  # of peers that know nothing of origins: they are asked by timestamp
PAGE_EVENTS = 2000
SNAPSHOT_FORMAT = 2  # 1 had a row's image as JSON
MEMBERS_MAX = 1000


class Evicted(GapError):
    """The cluster has given up the asker under its present origin: it must come back by a snapshot."""


@dataclass(frozen=True)
class Hello:
    """How every meeting begins and ends: each side says what it has, and what it knows of others."""

    node: str
    protocol: int
    now_ms: int
    tables: Mapping[str, Table]
    said: Said
    members: Mapping[str, Said]

    def as_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "protocol": self.protocol,
            "now_ms": self.now_ms,
            "tables": {name: table.as_json() for name, table in self.tables.items()},
            "said": self.said.as_json(),
            "members": {name: said.as_json() for name, said in self.members.items()},
        }

    @classmethod
    def from_json(cls, value: Any) -> Hello:
        try:
            if len(value["members"]) > MEMBERS_MAX or not all(NAME.fullmatch(name) for name in value["members"]):
                raise ValueError("members")
            return cls(
                str(value["node"]),
                int(value["protocol"]),
                int(value["now_ms"]),
                {str(name): Table.from_json(str(name), form) for name, form in value["tables"].items()},
                Said.from_json(value["said"]),
                {name: Said.from_json(said) for name, said in value["members"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError("a peer's hello cannot be read", hint="it is of another version of evermark") from None


@dataclass(frozen=True)
class Standing:
    """What a node has, for somebody who only looks."""

    hello: Hello
    floors: Mapping[str, Mapping[str, int]]  # by table and origin: up to where events were collected

    def as_json(self) -> dict[str, Any]:
        return {"hello": self.hello.as_json(), "floors": {table: dict(each) for table, each in self.floors.items()}}

    @classmethod
    def from_json(cls, value: Any) -> Standing:
        try:
            floors = {
                str(table): {str(origin): int(floor) for origin, floor in each.items()}
                for table, each in value["floors"].items()
            }
            return cls(Hello.from_json(value["hello"]), floors)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError("what a peer has cannot be read", hint="it is of another version of evermark") from None


@dataclass(frozen=True)
class Page:
    """Events of a table, and what they cover."""

    events: Sequence[Event]
    coverage: Coverage


@dataclass(frozen=True)
class Chunk:
    rows: int
    size: int  # bytes
    digest: str  # sha-256 of the file


@dataclass(frozen=True)
class Manifest:
    """A snapshot: its cut, and the digests of its chunks; `digest` is of all of that."""

    id: str
    table: str
    form: Mapping[str, Any]
    held: Held
    clock: int
    made_ms: int
    chunks: tuple[Chunk, ...]
    digest: str = ""
    files: tuple[int, ...] = ()  # how many chunks each of its files is made of (`native`); none: chunks are Parquet

    def as_json(self) -> dict[str, Any]:
        return {
            "format": SNAPSHOT_FORMAT,
            "snapshot_id": self.id,
            "table": self.table,
            "form": dict(self.form),
            "per_origin_seq_cut": held_as_json(self.held),
            "clock": self.clock,
            "created_at": self.made_ms,
            "chunks": [{"rows": each.rows, "size": each.size, "digest": each.digest} for each in self.chunks],
            "digest": self.digest,
            **({"files": list(self.files)} if self.files else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Manifest:
        try:
            if int(value["format"]) != SNAPSHOT_FORMAT:
                raise FormatError(
                    f"a snapshot is of format {int(value['format'])}, this program knows {SNAPSHOT_FORMAT}",
                    hint="let both nodes have the same version of evermark",
                )
            chunks = tuple(Chunk(int(c["rows"]), int(c["size"]), str(c["digest"])) for c in value["chunks"])
            held, form = held_from(value["per_origin_seq_cut"]), dict(value["form"])
            return cls(
                str(value["snapshot_id"]),
                str(value["table"]),
                form,
                held,
                int(value["clock"]),
                int(value["created_at"]),
                chunks,
                str(value["digest"]),
                tuple(map(int, value.get("files", ()))),
            )
        except (KeyError, TypeError, ValueError):
            raise FormatError("a snapshot's manifest cannot be read", hint="make a new one") from None


class Peer(Protocol):
    """Another replica, to be asked. Every call may fail with `UnreachableError`, and may have had its effect then."""

    name: str

    def hello(self, hello: Hello) -> Hello: ...

    def pull(self, table: str, origin: str, held: Held, limit: int) -> Page:
        """The next events that the asker, who holds `held`, has not got. `SnapshotRequired`, `Evicted`."""
        ...

    def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]: ...

    def push(self, table: str, origin: str, events: Sequence[Event]) -> Held:
        """Give events; what the peer holds afterwards."""
        ...

    def snapshot(self, table: str, native: str | None = None) -> Manifest:
        """`native`: as files of such a form, if the peer's table is of that form (`ReplicaStore.native_form`)."""
        ...

    def chunk(self, snapshot: str, number: int) -> bytes: ...

    def digests(self, table: str, spans: Sequence[Span]) -> list[Digest]: ...

    def rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]: ...

    def cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]: ...
