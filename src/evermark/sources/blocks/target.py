"""Where a block source is, which streams are taken from it, and where its state is kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from evermark.errors import ConfigError
from evermark.secrets import Hidden
from evermark.sources.blocks.stream_choice import ChosenStreams, StreamChoice

NODES_MAX = 16
PARTITIONS_MAX = 16
_SOURCE_CHARS_MAX = 64
_URL_CHARS_MAX = 2048


@dataclass(frozen=True)
class Pace:
    """How hard the nodes are asked, and for how long."""

    connect_s: float = 5.0
    read_s: float = 30.0
    patience_s: float = 10.0  # how long a task tries, node after node, before it gives up for now
    unreadable_s: float = 300.0  # how long nodes that do not answer are waited for before an unreadable event is poison
    away_s: float = 30.0  # for this long a node that did not answer is not asked for unreadable events
    requests_per_s: float = 500.0  # for blocks, of all tasks of a batch together
    slices_max: int = 16  # tasks that fetch one stream in one batch
    slice_s: float = 1.0  # how long a task is to fetch and decode, about: less is not worth a task of its own
    blocks_max: int = 20_000  # to fetch, in one batch
    streams_max: int = 1000  # in one batch
    carried_bytes_max: int = 4 * 1024 * 1024  # in one batch; blocks beyond that are fetched by the tasks


@dataclass(frozen=True)
class BlocksTarget:
    """Everything a block source needs to know. Picklable as far as its `state_dsn` and `token` are."""

    source: str
    nodes: tuple[str, ...]
    state_dsn: Hidden
    state_schema: str
    token: Hidden | None = None
    partitions: int = 1
    choice: StreamChoice = field(default_factory=ChosenStreams)
    whole: bool = True  # a stream without state is taken from its first block on, not from its latest snapshot
    cold: bool = False  # at the first start, only inboxes are looked at; other streams with their next event
    idle_after_s: float = 6 * 3600.0
    keep_unwanted_s: float = 30 * 86_400.0
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        if not 0 < len(self.source) <= _SOURCE_CHARS_MAX or "/" in self.source:
            raise ConfigError(f"{self.source[:80]!r} cannot name a block source", hint="a short name without slashes")
        if not 1 <= len(self.nodes) <= NODES_MAX:
            raise ConfigError(
                f"sources.{self.source}: {len(self.nodes)} nodes", hint=f"name 1 to {NODES_MAX} of them under nodes:"
            )
        if not all(map(is_node_url, self.nodes)):
            raise ConfigError(
                f"sources.{self.source}: one of the nodes has no address that can be used",
                hint="for example http://127.0.0.1:8330; a token goes under token:",
            )
        if not 1 <= self.partitions <= PARTITIONS_MAX:
            raise ConfigError(
                f"sources.{self.source}: {self.partitions} partitions", hint=f"1 to {PARTITIONS_MAX} are possible"
            )


def is_node_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return good and len(url) <= _URL_CHARS_MAX and not (parts.username or parts.query or parts.fragment)
