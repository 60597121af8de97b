"""The client of etcd, which threads share."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("etcd3gw", reason="no etcd3gw: the client of etcd is not tested. pip install '.[etcd]'")

from etcd3gw import Etcd3Client

from evermark.etcd.client import EtcdClient
from evermark.etcd.settings import EtcdConfig
from evermark.secrets import Secret

PORTS = range(1, 4)


def test_who_asks_while_another_thread_has_its_answer_finds_all_endpoints() -> None:
    """GIVEN a client that threads share WHEN one of them has its answer, and the endpoints are put in order THEN at
    each moment of that another finds all of them: a list that is being sorted would be empty for it."""
    given = {"endpoints": [f"http://127.0.0.1:{port}" for port in PORTS]}
    client = EtcdClient(EtcdConfig.model_validate(given), "cluster.leases.etcd")
    found: list[int] = []
    sys.setprofile(lambda *_: found.append(len(client._clients)))  # at each call, where threads may take turns
    try:
        client.ask("asking", lambda each: each.base_url)
    finally:
        sys.setprofile(None)
    assert set(found) == {len(PORTS)}


class Gateway:
    """etcd's HTTP gateway with tokens that carry the revision of its users, as `auth-token: jwt` makes them."""

    def __init__(self) -> None:
        self.revision, self.logins = 1, 0
        self.logging_in, self.may_log_in = threading.Event(), threading.Event()
        self.may_log_in.set()
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                self.tell(200, {"etcdserver": "3.5.1", "etcdcluster": "3.5.0"})

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                self.tell(*gateway.answer(self.path, self.headers.get("Authorization")))

            def tell(self, status: int, answer: dict[str, object]) -> None:
                body = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, object]]:
        if path.endswith("/auth/authenticate"):
            self.logging_in.set()
            self.may_log_in.wait(10)
            self.logins += 1
            return (200, {"token": f"of {self.revision}"}) if token is None else (400, _refused("invalid auth token"))
        if token is None:
            return 400, _refused("user name is empty")
        if token != f"of {self.revision}":
            return 400, _refused("revision of auth store is old")
        return 200, {"succeeded": True}

    def client(self) -> EtcdClient:
        place = f"http://127.0.0.1:{self.server.server_port}"
        given = {"endpoints": [place], "user": "evermark", "password": Secret("x")}
        return EtcdClient(EtcdConfig.model_validate(given), "cluster.leases.etcd")


def _refused(said: str) -> dict[str, object]:
    return {"error": f"etcdserver: {said}", "message": f"etcdserver: {said}", "code": 3}


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_who_logged_in_before_users_were_changed_logs_in_again(gateway: Gateway) -> None:
    """GIVEN a client with a token WHEN somebody adds a user to etcd, which makes every such token old THEN the client
    logs in again, once: it was told that for ever, and its instance could take no lease until it was started again."""
    client = gateway.client()
    assert client.transaction("asking", [])["succeeded"]
    gateway.revision += 1
    for _ in range(2):
        assert client.transaction("asking", [])["succeeded"]
    assert gateway.logins == 2


def test_who_asks_while_another_thread_logs_in_has_a_token(gateway: Gateway) -> None:
    """GIVEN a thread that is about to ask with a token WHEN another one is logging in anew THEN the first still sends
    that token, and logs in if it must: without any it would be told that its password is wrong."""
    client = gateway.client()
    client.transaction("asking", [])
    gateway.revision += 1
    gateway.logging_in.clear()
    gateway.may_log_in.clear()
    with ThreadPoolExecutor() as threads:
        other = threads.submit(client.transaction, "asking", [])
        assert gateway.logging_in.wait(10)
        sent: list[object] = []

        def ask(each: Etcd3Client) -> object:
            sent.append(each.session.headers.get("Authorization"))
            gateway.may_log_in.set()
            return each.transaction({"compare": [], "success": [], "failure": []})

        assert client.ask("asking", ask)["succeeded"]  # type: ignore[index]
        assert other.result()["succeeded"]
    assert sent[0] == "of 1" and None not in sent
