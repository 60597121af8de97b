"""A node's folder: who it is, where its tables are, its peers and their keys. Only its owner may read it."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from evermark import durations
from evermark.disk import write_whole
from evermark.errors import ConfigError, NotFoundError
from evermark.replicas.auth import KEY_CHARS_MIN
from evermark.replicas.event import NAME
from evermark.replicas.identity import Tokens
from evermark.replicas.local_node import Limits
from evermark.secrets import Secret, read_small_file

CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,63}", re.ASCII)
_FILE, _TOKENS, _LOCK = "replica.json", "tokens.json", ".lock"
_DURATIONS = ("retention", "safety", "dead_after", "skew")
_KEYS = {"version", "cluster", "name", "store", "schema", "service", "retention_by_table", "peers", *_DURATIONS}


@dataclass(frozen=True)
class PeerSettings:
    key: Secret
    url: str | None = None  # without one it is never dialled, and dials us


@dataclass(frozen=True)
class ReplicaSettings:
    """`store` is the path of a SQLite file, a Postgres DSN, or `env:NAME` for a variable that holds either."""

    cluster: str
    name: str
    store: Secret
    schema: str | None = None
    service: str = "replica"
    retention: str = "7d"
    safety: str = "1h"
    dead_after: str = "30d"
    skew: str = "5m"
    retention_by_table: dict[str, str] = field(default_factory=dict)
    peers: dict[str, PeerSettings] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"name: {self.name[:60]!r} is no name", hint="lower-case letters, digits and -, 41 at most"
            )
        if not CLUSTER.fullmatch(self.cluster):
            raise ConfigError("cluster: this is no cluster id", hint="3 to 64 letters, digits and ._-")
        if not re.fullmatch(r"[a-z][a-z0-9_/-]{0,40}", self.service):
            raise ConfigError("service: this is no name of a service", hint="lower-case letters, digits and _/-")
        for name, peer in self.peers.items():
            if not NAME.fullmatch(name) or name == self.name:
                raise ConfigError(f"peers: {name[:60]!r} is no name of a peer", hint="every node has its own name")
            if peer.url is not None:
                _check_url(name, peer.url)
            if len(peer.key.reveal()) < KEY_CHARS_MIN:
                raise ConfigError(
                    f"peers.{name}.key is too short",
                    hint=f"{KEY_CHARS_MIN} characters at least; `replica add` makes one",
                )
        limits = self.limits()
        if limits.retention_ms + limits.safety_ms < 2 * limits.skew_ms or limits.dead_ms <= limits.retention_ms:
            raise ConfigError(
                "retention and safety have to be twice the skew at least, and dead_after longer than retention",
                hint="for example skew: 5m, safety: 1h, retention: 7d, dead_after: 30d",
            )

    def limits(self) -> Limits:
        return Limits(
            skew_ms=_ms("skew", self.skew),
            retention_ms=_ms("retention", self.retention),
            safety_ms=_ms("safety", self.safety),
            dead_ms=_ms("dead_after", self.dead_after),
            retention_by_table_ms={
                table: _ms(f"retention_by_table.{table}", text) for table, text in self.retention_by_table.items()
            },
        )

    def address(self) -> str:
        """Where the tables are."""
        text = self.store.reveal()
        if not text.startswith("env:"):
            return text
        found = os.environ.get(text[4:])
        if not found:
            raise ConfigError(f"store: the variable {text[4:]} is not set", hint="set it to a path or a Postgres DSN")
        return found


def is_dsn(address: str) -> bool:
    if address.startswith(("postgresql://", "postgres://")) or "dbname=" in address or "host=" in address:
        return True
    if "://" in address:  # no path of a file: an error about one would say it, with the password that may be in it
        raise ConfigError(
            "store: this address is neither a path nor one of Postgres",
            hint="it begins with postgresql:// or postgres://, in small letters and with nothing behind the first word",
        )
    return False


def resolved(store: str) -> str:
    """A store as the folder keeps it: a path is the same file wherever a command is run."""
    return store if store.startswith("env:") or is_dsn(store) else str(Path(store).resolve())


def is_url(url: str) -> bool:
    """Whether a node can be dialled there."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    return is_good and parts.username is None and parts.password is None


def _check_url(name: str, url: str) -> None:
    if not is_url(url):
        raise ConfigError(f"peers.{name}.url is no url of a peer", hint="for example http://south:8440, without a user")


def _ms(name: str, text: str) -> int:
    try:
        return int(durations.parse(text).total_seconds() * 1000)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", hint="for example 5m, 12h or 7d") from None


class ReplicaFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.snapshots = path / "snapshots"

    def exists(self) -> bool:
        return (self.path / _FILE).exists()

    def load(self) -> ReplicaSettings:
        path = self.path / _FILE
        if not path.exists():
            raise NotFoundError(f"there is no replica in {self.path}", hint="make one with: evermark replica init")
        try:
            value = json.loads(read_small_file(path, "replica"))
            unknown = sorted(set(value) - _KEYS)
        except (ValueError, TypeError):
            raise ConfigError(f"{path} is no JSON mapping", hint="restore it from a copy") from None
        if unknown:
            raise ConfigError(f"{path}: unknown key {unknown[0]}", hint=f"known are {', '.join(sorted(_KEYS))}")
        if value.pop("version", 1) != 1:
            raise ConfigError(f"{path} is of a newer version of evermark", hint="upgrade")
        try:
            peers = {
                name: PeerSettings(Secret(each["key"]), each.get("url")) for name, each in value.pop("peers").items()
            }
            return ReplicaSettings(**{**value, "store": Secret(value["store"])}, peers=peers)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: a key is missing or has a wrong value: {error}", hint="see docs/replicas.md"
            ) from None

    def save(self, settings: ReplicaSettings) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        value: dict[str, Any] = {"version": 1, **vars(settings), "store": settings.store.reveal()}
        value["peers"] = {name: {"url": p.url, "key": p.key.reveal()} for name, p in settings.peers.items()}
        write_whole(self.path / _FILE, json.dumps(value, indent=2) + "\n", replace=True, mode=0o600)

    def add_peer(self, name: str, peer: PeerSettings) -> ReplicaSettings:
        settings = self.load()
        changed = replace(settings, peers={**settings.peers, name: peer})
        self.save(changed)
        return changed

    def remove_peer(self, name: str) -> ReplicaSettings:
        settings = self.load()
        if name not in settings.peers:
            raise NotFoundError(f"{name[:60]!r} is no peer of this node", hint="see `evermark replica list`")
        changed = replace(settings, peers={peer: each for peer, each in settings.peers.items() if peer != name})
        self.save(changed)
        return changed

    @contextmanager
    def claiming(self) -> Iterator[None]:
        """One process at a time looks whether the database is still its own."""
        with open(self.path / _LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def tokens(self) -> Tokens:
        path = self.path / _TOKENS
        return Tokens(**json.loads(path.read_text())) if path.exists() else Tokens()

    def keep(self, tokens: Tokens) -> None:
        write_whole(self.path / _TOKENS, json.dumps(vars(tokens)), replace=True, mode=0o600)
