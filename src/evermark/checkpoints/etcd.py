"""Checkpoints in etcd: one key for each partition, `<prefix><source>/partition-<number>`, replaced by transactions.

The value is JSON (docs/formats.md). etcd answers a write when a majority has it on disk.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from etcd3gw import Etcd3Client
from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.kinds import CheckpointConfig, EtcdConfig
from evermark.checkpoints.outside import OutsideCheckpoints, Stored
from evermark.errors import DeniedError, EvermarkError, FormatError, UnreachableError
from evermark.secrets import opened
from evermark.state.connection import State

VERSION = 1
TIMEOUT_S = 3.0
_PARTITIONS_MAX = 10_000
_DENIED = ("invalid auth token", "user name is empty", "permission denied", "authentication failed")
_TEXT_MAX = 300
T = TypeVar("T")


def open_in_etcd(settings: CheckpointConfig, state: State) -> OutsideCheckpoints:
    prefix = settings.etcd.prefix or f"/{state.schema}/checkpoints/"
    return OutsideCheckpoints(EtcdRows(settings.etcd, prefix))


class EtcdRows:
    """`ComparedRows` over the HTTP gateway of etcd. Endpoints that do not answer are passed over."""

    def __init__(self, settings: EtcdConfig, prefix: str) -> None:
        self._settings = settings
        self._prefix = prefix
        self._clients = [self._client(endpoint) for endpoint in settings.endpoints]
        self._lock = threading.Lock()
        self._logging_in = threading.Lock()

    def _client(self, endpoint: str) -> Etcd3Client:
        at = urlsplit(endpoint)
        return Etcd3Client(
            host=at.hostname or "",
            port=at.port or 2379,
            protocol=at.scheme,
            ca_cert=self._settings.ca,
            cert_cert=self._settings.cert,
            cert_key=self._settings.key,
            timeout=TIMEOUT_S,
        )

    def get(self, source: str, partition: int) -> Stored | None:
        key = self._key(source, partition)
        found = self._ask("reading a checkpoint", lambda client: client.get(key, metadata=True, limit=1))
        return _stored(*found[0]) if found else None

    def list(self, source: str) -> dict[int, Checkpoint]:
        begin = f"{self._prefix}{source}/partition-"
        found = self._ask(
            "listing checkpoints",
            lambda client: client.get(begin, metadata=True, range_end=_end_of(begin), limit=_PARTITIONS_MAX),
        )
        rows = ((metadata["key"].decode().removeprefix(begin), value, metadata) for value, metadata in found)
        return dict(
            sorted((int(number), _stored(value, metadata)[0]) for number, value, metadata in rows if number.isdecimal())
        )

    def swap(self, source: str, partition: int, new: Checkpoint, old: Stored | None) -> Stored | None:
        key, value = self._key(source, partition), json.dumps({"v": VERSION, **vars(new)}).encode()
        compare = {
            "key": _base64(key.encode()),
            "result": "EQUAL",
            "target": "MOD",
            "mod_revision": old[1] if old else 0,
        }
        put = {"request_put": {"key": _base64(key.encode()), "value": _base64(value)}}
        asked = {"compare": [compare], "success": [put], "failure": []}
        answer = self._ask("saving a checkpoint", lambda client: client.transaction(asked))
        return (new, int(answer["header"]["revision"])) if answer.get("succeeded") else None

    def delete(self, source: str, partition: int) -> None:
        key = self._key(source, partition)
        self._ask("deleting a checkpoint", lambda client: client.delete(key))

    def _key(self, source: str, partition: int) -> str:
        return f"{self._prefix}{source}/partition-{partition}"

    def _ask(self, doing: str, call: Callable[[Etcd3Client], T]) -> T:
        """The first endpoint that answers is asked first from then on."""
        trouble: EvermarkError | None = None
        for client in list(self._clients):
            try:
                answer = self._authenticated(client, call)
            except (Etcd3Exception, OSError, ValueError, KeyError) as error:
                trouble = _translated(error, doing, client.base_url)
                if isinstance(trouble, DeniedError):
                    break
                continue
            with self._lock:
                self._clients.sort(key=lambda each: each is not client)
            return answer
        raise trouble or UnreachableError("etcd has no endpoints")

    def _authenticated(self, client: Etcd3Client, call: Callable[[Etcd3Client], T]) -> T:
        """A token of etcd runs out after minutes without use: then the user logs in again, once."""
        if self._settings.user is None:
            return call(client)
        token = client.session.headers.get("Authorization")
        if token is not None:
            try:
                return call(client)
            except Etcd3Exception as error:
                if "invalid auth token" not in _said(error):
                    raise
        with self._logging_in:  # threads share the client: one of them logs in, and the others use its token
            if client.session.headers.get("Authorization") == token:
                self._log_in(client)
        return call(client)

    def _log_in(self, client: Etcd3Client) -> None:
        client.session.headers.pop("Authorization", None)
        password = opened(self._settings.password) if self._settings.password is not None else ""
        given = {"name": self._settings.user, "password": password}
        client.session.headers["Authorization"] = client.post(client.get_url("/auth/authenticate"), json=given)["token"]


def _stored(value: bytes, metadata: Any) -> Stored:
    try:
        found = json.loads(value)
        version = found.pop("v")
        if version == VERSION:
            return Checkpoint(str(found["position"]), int(found["batch"]), int(found["epoch"])), int(
                metadata["mod_revision"]
            )
    except (ValueError, KeyError, TypeError, AttributeError):
        version = "damaged"
    raise FormatError(
        f"the checkpoint {metadata['key'].decode(errors='replace')} in etcd has version {str(version)[:20]}; this"
        f" program knows {VERSION}",
        hint="is the prefix shared with another program? `evermark checkpoint reset` forgets it",
    )


def _end_of(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _said(error: Exception) -> str:
    """Without the parts of a request: they may name a password."""
    if isinstance(error, ConnectionTimeoutError):
        return f"no answer within {TIMEOUT_S:g} s"
    if isinstance(error, ConnectionFailedError):
        return "no connection"
    return str(getattr(error, "detail_text", None) or type(error).__name__)[:_TEXT_MAX]


def _translated(error: Exception, doing: str, place: str) -> EvermarkError:
    said = _said(error)
    text = f"{doing} in etcd at {place}: {said}"
    if any(known in said for known in _DENIED):
        return DeniedError(text, hint="check reliability.checkpoint.etcd.user and its password, and the role's prefix")
    return UnreachableError(text, hint="is etcd up, reachable, and has it a leader? `etcdctl endpoint status`")
