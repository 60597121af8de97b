"""A running `evermark up` with an HTTP API, and receivers as the API demands them: by https, and on an open address.

There is no public receiver on a test machine. So the instance's process and its workers are started with one thing
changed: 127.0.0.1 counts as a public address. Everything else, https and its certificate included, is as it always is.
"""

from __future__ import annotations

import ipaddress
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psycopg
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from evermark.delivery.webhook.signing import new_secret
from evermark.testing.pipeline import Instance
from evermark.testing.until import until
from evermark_receiver.signature import VerificationError, verify

WRITER, READER = "acceptance-writer-token-1", "acceptance-reader-token-2"
_OPENED = """\
from evermark.config import addresses
from evermark.delivery.webhook import guard

guard._CLOSED_V4 = tuple(closed for closed in guard._CLOSED_V4 if closed[1] != "loopback")
_is_public = addresses.is_public
addresses.is_public = lambda address: address.is_loopback or _is_public(address)
"""
_FILE = """\
version: 1
name: api
data: {data}
state: {{dsn: "${{SHOP_DSN}}"}}
server:
  listen: "127.0.0.1:0"
  tokens:
    ops: "${{OPS_TOKEN}}"
    dashboard: {{token: "${{DASHBOARD_TOKEN}}", may: read}}
sources:
  shop: {{type: postgres, dsn: "${{SHOP_DSN}}", tables: [public.orders]}}
subscriptions:
  by_file: {{url: "{url}/by_file", secret: "${{FILE_SECRET}}"}}
"""


@dataclass
class Got:
    """One request as it came."""

    headers: dict[str, str]
    body: bytes
    at: float

    @property
    def event(self) -> Any:
        return json.loads(self.body)

    def is_signed_by(self, secret: str) -> bool:
        try:
            verify(self.headers, self.body, secret, now=self.at)
        except VerificationError:
            return False
        return True


@dataclass
class Hooks:
    """Receivers of all paths, on one port, by https. Each path answers with its status, and perhaps a Retry-After."""

    folder: Path
    statuses: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 204))
    retry_after_s: dict[str, int] = field(default_factory=dict)
    got: dict[str, list[Got]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        hooks = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                status = hooks.statuses[self.path]
                hooks.got[self.path].append(Got(headers, body, time.time()))
                self.send_response(status)
                if self.path in hooks.retry_after_s:
                    self.send_header("retry-after", str(hooks.retry_after_s[self.path]))
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self._key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="hooks", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def _key(self) -> Path:
        return self.folder / "key.pem"

    @property
    def certificate(self) -> Path:
        """Made once, and trusted by whoever is told to."""
        path = self.folder / "certificate.pem"
        if path.exists():
            return path
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "receivers of a test")])
        now = datetime.now(UTC)
        made = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(key, hashes.SHA256())
        )
        path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
        self._key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return path

    def ids(self, path: str) -> set[int]:
        """The orders this path was told of."""
        return {got.event["data"]["id"] for got in self.got[path] if got.event["type"] != "evermark.test"}


class Running:
    """One `evermark up`, its API, its shop and its receivers."""

    def __init__(self, folder: Path, dsn: str, hooks: Hooks) -> None:
        self.folder, self.dsn, self.hooks = folder, dsn, hooks
        self.config = folder / "evermark.yaml"
        self.config.write_text(_FILE.format(data=folder / "data", url=hooks.url))
        opened = folder / "site"
        opened.mkdir()
        (opened / "sitecustomize.py").write_text(_OPENED)
        self.file_secret = new_secret()
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(opened), os.environ.get("PYTHONPATH", "")])),
            "SSL_CERT_FILE": str(hooks.certificate),
            "SHOP_DSN": dsn,
            "OPS_TOKEN": WRITER,
            "DASHBOARD_TOKEN": READER,
            "FILE_SECRET": self.file_secret,
        }
        self.log = folder / "up.log"
        self.instance: Instance | None = None

    def up(self) -> None:
        self.instance = Instance(self.config, self.env, self.log)

    def base(self) -> str | None:
        """The API's address, once the instance has said it."""
        assert self.instance is not None and not self.instance.died(), self.log.read_text()[-3000:]
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{"))
        listen = next((line["listen"] for line in lines if line["event"] == "up"), None)
        return listen and f"http://{listen}"

    def ask(self, method: str, path: str, body: Any = None, token: str | None = WRITER) -> tuple[int, Any]:
        request = urllib.request.Request(  # noqa: S310 - the instance's own address
            f"{self.base()}/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=40) as answer:  # noqa: S310 - as above
                text = answer.read()
                return answer.status, json.loads(text) if text else None
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def good(self, method: str, path: str, body: Any = None) -> Any:
        status, told = self.ask(method, path, body)
        assert 200 <= status < 300, told
        return told

    def order(self, rows: int = 1) -> set[int]:
        """Committed orders, by their ids."""
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            made = conn.execute(
                "insert into public.orders (total) select n from generate_series(1, %s) n returning id", (rows,)
            )
            return {int(row[0]) for row in made.fetchall()}

    def arrive(self, path: str, ids: set[int]) -> None:
        """Wait until this path has these orders."""
        until(lambda: ids <= self.hooks.ids(path), f"{path} has {sorted(ids)}")

    def state_of(self, name: str) -> str:
        return str(self.good("GET", f"subscriptions/{name}")["state"])


@contextmanager
def running(folder: Path, dsn: str) -> Iterator[Running]:
    hooks = Hooks(folder)
    scene = Running(folder, dsn, hooks)
    try:
        yield scene
    finally:
        if scene.instance is not None and not scene.instance.died():
            scene.instance.kill()
        hooks.close()
