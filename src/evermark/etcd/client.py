"""The client of etcd that all who keep something there share: JSON over its HTTP gateway.

etcd answers a write when a majority has it on disk. Endpoints that do not answer are passed over.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from etcd3gw import Etcd3Client
from etcd3gw.exceptions import ConnectionFailedError, ConnectionTimeoutError, Etcd3Exception

from evermark.errors import DeniedError, EvermarkError, UnreachableError
from evermark.etcd.settings import EtcdConfig
from evermark.secrets import opened

TIMEOUT_S = 3.0
# What etcd says of a token that ran out, and of one from before users or roles were changed (`auth-token: jwt`).
_TOKEN_IS_OLD = ("invalid auth token", "revision of auth store is old")
_DENIED = ("invalid auth token", "user name is empty", "permission denied", "authentication failed")
_TEXT_MAX = 300
T = TypeVar("T")


class EtcdClient:
    """`section` of the file says how it is reached: errors name it. An endpoint has `timeout_s` to answer."""

    def __init__(self, settings: EtcdConfig, section: str, timeout_s: float | None = None) -> None:
        self._settings = settings
        self.section = section
        self._timeout_s = timeout_s or TIMEOUT_S
        self._clients = [self._client(endpoint) for endpoint in settings.endpoints]
        self._lock = threading.Lock()
        self._logging_in = threading.Lock()

    def _client(self, endpoint: str) -> Etcd3Client:
        at = urlsplit(endpoint)
        client = Etcd3Client(
            host=at.hostname or "",
            port=at.port or 2379,
            protocol=at.scheme,
            ca_cert=self._settings.ca,
            cert_cert=self._settings.cert,
            cert_key=self._settings.key,
            timeout=self._timeout_s,
        )
        if self._settings.ca is not None:
            client.session.trust_env = False  # REQUESTS_CA_BUNDLE would be used instead of what the file says
        return client

    def transaction(
        self, doing: str, compare: Sequence[Any], success: Sequence[Any] = (), failure: Sequence[Any] = ()
    ) -> Any:
        """etcd's answer, whose `succeeded` says whether all comparisons held and `success` was therefore done; else
        `failure` was.
        """
        asked = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        return self.ask(doing, lambda client: client.transaction(asked))

    def post(self, doing: str, path: str, body: Any) -> Any:
        return self.ask(doing, lambda client: client.post(client.get_url(path), json=body))

    def ask(self, doing: str, call: Callable[[Etcd3Client], T]) -> T:
        """The first endpoint that answers is asked first from then on."""
        trouble: EvermarkError | None = None
        for client in self._clients:
            try:
                answer = self._authenticated(client, call)
            except (Etcd3Exception, OSError, ValueError, KeyError) as error:
                trouble = self._translated(error, doing, client.base_url)
                if isinstance(trouble, DeniedError):
                    break
                continue
            with self._lock:  # another list: one that is being sorted is empty for other threads
                self._clients = sorted(self._clients, key=lambda each: each is not client)
            return answer
        raise trouble or UnreachableError("etcd has no endpoints")

    def _authenticated(self, client: Etcd3Client, call: Callable[[Etcd3Client], T]) -> T:
        """A token runs out after minutes without use, and when users are changed: the user logs in again, once."""
        if self._settings.user is None:
            return call(client)
        token = client.session.headers.get("Authorization")
        if token is not None:
            try:
                return call(client)
            except Etcd3Exception as error:
                if not any(said in self._said(error) for said in _TOKEN_IS_OLD):
                    raise
        with self._logging_in:  # threads share the client: one of them logs in, and the others use its token
            if client.session.headers.get("Authorization") == token:
                self._log_in(client)
        return call(client)

    def _log_in(self, client: Etcd3Client) -> None:
        password = opened(self._settings.password) if self._settings.password is not None else ""
        given = {"name": self._settings.user, "password": password}
        # Without the old token, in this request alone: others use the client meanwhile.
        bare = {"Authorization": None}
        answer = client.post(client.get_url("/auth/authenticate"), json=given, headers=bare)
        client.session.headers["Authorization"] = answer["token"]

    def _said(self, error: Exception) -> str:
        """Without the parts of a request: they may name a password."""
        if isinstance(error, ConnectionTimeoutError):
            return f"no answer within {self._timeout_s:g} s"
        if isinstance(error, ConnectionFailedError):
            return "no connection"
        return str(getattr(error, "detail_text", None) or type(error).__name__)[:_TEXT_MAX]

    def _translated(self, error: Exception, doing: str, place: str) -> EvermarkError:
        said = self._said(error)
        text = f"{doing} in etcd at {place}: {said}"
        if any(known in said for known in _DENIED):
            return DeniedError(text, hint=f"check {self.section}.user and its password, and the role's prefix")
        return UnreachableError(text, hint="is etcd up, reachable, and has it a leader? `etcdctl endpoint status`")


def end_of(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
