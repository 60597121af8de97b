"""The settings of a node: its folder and address, when it seals, and a bound on everything."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from evermark.errors import ConfigError

MIB = 1024 * 1024
TOKEN_CHARS_MIN = 24
BODY_BYTES_MAX = 16 * MIB
EVENTS_IN_ADD_MAX = 1000
STREAMS_IN_ASK_MAX = 10_000
LISTED_MAX = 1000
WAIT_S_MAX = 60.0
WRITES_WAITING_MAX = 4096
READS_WAITING_MAX = 1024


@dataclass(frozen=True)
class NodeSettings:
    data: Path
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = field(default=None, repr=False)
    follow: str | None = None  # the url of the node to copy
    follow_token: str | None = field(default=None, repr=False)
    seal_events: int = 100
    seal_bytes: int = MIB
    seal_after_s: float = 2.0
    snapshot_every: int = 10  # blocks
    snapshot_bytes: int = 4 * MIB  # of blocks since the last one, at the latest: it bounds what follows a snapshot
    page_blocks: int = 500
    page_bytes: int = 4 * MIB
    resume_blocks: int = 500  # a cookie further behind than this is answered with a reset
    event_bytes: int = 64 * 1024
    members_max: int = 10_000
    settings_max: int = 100
    syncs_max: int = 1000
    sync_streams_max: int = 200_000
    keepalive_s: float = 15.0
    stall_s: float = 30.0  # a sync whose client reads nothing for this long is cut off

    def __post_init__(self) -> None:
        for name in ("seal_events", "snapshot_every", "page_blocks", "resume_blocks", "event_bytes", "syncs_max"):
            if getattr(self, name) < 1:
                raise ConfigError(f"blocknode: {name} is {getattr(self, name)}", hint="it has to be 1 at least")
        for name in ("seal_after_s", "keepalive_s", "stall_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise ConfigError(f"blocknode: {name} is {getattr(self, name)}", hint="give a time of at most an hour")
        if self.event_bytes > 4 * MIB:
            raise ConfigError(f"blocknode: events of {self.event_bytes} bytes", hint="at most 4 MiB: send a reference")
        if self.token is not None and len(self.token) < TOKEN_CHARS_MIN:
            raise ConfigError(
                "blocknode: the token is too short", hint=f"take {TOKEN_CHARS_MIN} random characters at least"
            )
        if self.follow is not None and not _is_address(self.follow):
            hint = "for example http://127.0.0.1:8330; a token goes under --follow-token"
            raise ConfigError("blocknode: --follow is not the address of a node", hint=hint)


def _is_address(url: str) -> bool:
    """Of a node, and nothing more: everybody who asks this one is told whom it follows, and nobody its secrets."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return named and "@" not in parts.netloc and not (parts.query or parts.fragment)
