"""Another replica over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from evermark.errors import ConfigError, DeniedError, FormatError, UnreachableError
from evermark.replicas.auth import Party
from evermark.replicas.digests import Digest, RowDigest, Span
from evermark.replicas.event import Event
from evermark.replicas.exchange import Hello, Manifest, Page, Standing
from evermark.replicas.ranges import Held, held_as_json, held_from
from evermark.replicas.snapshots import CHUNK_BYTES_MAX
from evermark.replicas.values import Table
from evermark.replicas.wire import (
    BODY_BYTES_MAX,
    coverage_from,
    error_from,
    events_from_bytes,
    events_to_bytes,
    note_of,
)

TIMEOUT_S = 60.0
_TIMEOUTS_S = {"snapshot": 900.0, "digests": 600.0, "cuts": 600.0}  # the peer reads its whole table for these


class HttpPeer:
    """Speaks to one peer over one connection, which is made when it is needed. Not thread-safe."""

    def __init__(
        self,
        url: str,
        party: Party,
        tables: Callable[[], Mapping[str, Table]],
        now_ms: Callable[[], int],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the url of {party.peer} is no http url", hint="for example http://10.0.0.7:8440")
        self.name, self._party, self._tables, self._now_ms = party.peer, party, tables, now_ms
        self._secure, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._path, self._timeout_s = parts.path.rstrip("/"), timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self.bytes_moved = 0  # bodies, in both directions

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def hello(self, hello: Hello) -> Hello:
        return Hello.from_json(self._json("hello", hello.as_json()))

    def standing(self) -> Standing:
        return Standing.from_json(self._json("standing", {}))

    def pull(self, table: str, origin: str, held: Held, limit: int, only: Held | None = None) -> Page:
        asked: dict[str, Any] = {"table": table, "origin": origin, "from_by_origin": held_as_json(held), "limit": limit}
        if only is not None:
            asked["only"] = held_as_json(only)
        body = self._ask("pull", json.dumps(asked).encode())
        return Page(events_from_bytes(body, self._tables()[table]), coverage_from(note_of(body)))

    def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
        asked = {"table": table, "from_timestamp": timestamp, "after_id": event_id, "limit": limit}
        return events_from_bytes(self._ask("pull-since", json.dumps(asked).encode()), self._tables()[table])

    def push(self, table: str, origin: str, events: Sequence[Event]) -> Held:
        body = self._ask("push", events_to_bytes(events, {"table": table, "origin": origin}))
        return held_from(_read_json(self.name, body)["held"])

    def snapshot(self, table: str, native: str | None = None, covering: Held | None = None) -> Manifest:
        asked = {"table": table, "native": native, "covering": held_as_json(covering or {})}
        return Manifest.from_json(self._json("snapshot", asked))

    def chunk(self, snapshot: str, number: int) -> bytes:
        asked = json.dumps({"snapshot": snapshot, "number": number}).encode()
        return self._ask("chunk", asked, bytes_max=CHUNK_BYTES_MAX)

    def digests(self, table: str, spans: Sequence[Span]) -> list[Digest]:
        found = self._json("digests", {"table": table, "spans": [list(span) for span in spans]})
        return [Digest(int(rows), bytes.fromhex(value)) for rows, value in found["digests"]]

    def rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]:
        found = self._json("rows", {"table": table, "spans": [list(span) for span in spans]})
        return [[(record, bytes.fromhex(value)) for record, value in rows] for rows in found["rows"]]

    def cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        found = self._json("cuts", {"table": table, "spans": [list(span) for span in spans], "pieces": pieces})
        return [[str(record) for record in keys] for keys in found["cuts"]]

    def _json(self, what: str, asked: Any) -> Any:
        return _read_json(self.name, self._ask(what, json.dumps(asked).encode()))

    def _ask(self, what: str, body: bytes, bytes_max: int = BODY_BYTES_MAX) -> bytes:
        path = f"/v1/replica/{what}"
        try:
            nonce, status, signature, answer = self._exchange(path, body, bytes_max)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise UnreachableError(
                f"{self.name} does not answer at {self._host}: {type(error).__name__} {error}",
                hint="is it running, and is its url right? evermark replica list",
            ) from None
        self.bytes_moved += len(body) + len(answer)
        if status == 401:
            # A node that does not know us cannot sign for us: all it says is that it refuses.
            raise DeniedError(
                f"{self.name} refuses us: {str(_read_json(self.name, answer).get('message'))[:200]}",
                hint="compare cluster, names and keys on both sides: evermark replica list",
            )
        try:
            self._party.check_answer(nonce, status, signature, answer)
        except DeniedError:
            if status < 500:
                raise
            raise UnreachableError(
                f"{self.name} does not answer: something before it says {status}",
                hint="is it running behind its proxy? evermark replica list",
            ) from None
        if status != 200:
            raise error_from(self.name, _read_json(self.name, answer))
        return answer

    def _exchange(self, path: str, body: bytes, limit: int) -> tuple[str, int, str, bytes]:
        try:
            return self._once(path, body, limit, is_new=self._connection is None)
        except (ConnectionError, http.client.HTTPException):
            if self._connection is None:
                raise
        self.close()  # the peer hung up on a connection that was idle: any request may be made again
        return self._once(path, body, limit, is_new=True)

    def _once(self, path: str, body: bytes, limit: int, *, is_new: bool) -> tuple[str, int, str, bytes]:
        headers = self._party.sign_request("POST", path, body, self._now_ms())
        if self._connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            self._connection = kind(self._host, self._port, timeout=self._timeout_s)
        try:
            if self._connection.sock is None:
                self._connection.connect()
            self._connection.sock.settimeout(_TIMEOUTS_S.get(path.rpartition("/")[2], self._timeout_s))
            self._connection.request("POST", self._path + path, body, headers)
            response = self._connection.getresponse()
        except (ConnectionError, http.client.HTTPException):
            if is_new:
                self.close()
            raise
        answer = response.read(limit + 1)
        if len(answer) > limit:
            self.close()
            raise FormatError(f"{self.name} answers with more than {limit} bytes", hint="it is damaged, or no replica")
        return headers["evermark-nonce"], response.status, response.headers.get("evermark-signature", ""), answer


def _read_json(peer: str, body: bytes) -> Any:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FormatError(f"{peer} answers something else than a replica does", hint="is its url right?")
    return found
