"""Receivers for the tests of the webhook sink: real servers on loopback, and rows to send them."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pyarrow as pa
from aiohttp import web

from evermark.delivery.model import Outcome, SubscriptionSpec
from evermark.delivery.webhook.base import Result
from evermark.delivery.webhook.signing import new_secret
from evermark.event import EVENT

AT = datetime(2026, 11, 15, 1, 2, 3, 4, tzinfo=UTC)
LOOPBACK = ("127.0.0.0/8", "::1/128")
SECRET = new_secret()
Handler = Callable[["Got"], "web.StreamResponse | int | Awaitable[web.StreamResponse | int]"]


@dataclass(frozen=True)
class Got:
    """One request as the receiver saw it."""

    headers: dict[str, str]
    body: bytes
    raw: web.Request = field(repr=False, compare=False)

    @property
    def ids(self) -> list[str]:
        parsed = json.loads(self.body)
        return [one["evermark"]["id"] for one in parsed.get("events", [parsed])]


class Receiver:
    """A real HTTP server in a thread. `answer` is asked for every request; a number is a status."""

    def __init__(self, answer: Handler | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.answer: Handler = answer or (lambda got: 204)
        self.got: list[Got] = []
        self.under_way = self.under_way_max = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._start(tls), self._loop).result(10)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}/hook"

    async def _start(self, tls: ssl.SSLContext | None) -> int:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        return int(self._runner.addresses[0][1])

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        got = Got({name.lower(): value for name, value in request.headers.items()}, await request.read(), request)
        self.got.append(got)
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        try:
            answer = self.answer(got)
            if isinstance(answer, Awaitable):
                answer = await answer
        finally:
            self.under_way -= 1
        return web.Response(status=answer) if isinstance(answer, int) else answer

    @property
    def ids(self) -> list[str]:
        return [ident for got in list(self.got) for ident in got.ids]

    async def _end(self) -> None:
        await self._runner.cleanup()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def spec_for(url: str, **changes: Any) -> SubscriptionSpec:
    return replace(SubscriptionSpec("billing", url, (SECRET,), allow_networks=LOOPBACK, timeout_s=5.0), **changes)


def events(count: int, *, batch_rows: int = 1_000, keys: int = 0, **columns: Any) -> pa.Table:
    """`count` log rows of one place; `keys` says over how many keys they go round (0: each its own)."""
    rows = [
        {
            "event_id": f"e{n}", "source": "shop", "partition": 0, "position": f"{n:09d}", "batch": 1 + n // batch_rows,
            "stream": "public.orders", "key": str(n % keys if keys else n), "op": "insert", "event_time": AT,
            "ingested_at": AT, "payload": json.dumps({"n": n}), **columns,
        }
        for n in range(count)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows, schema=EVENT)


def one_outcome(results: list[Result]) -> Outcome:
    (result,) = results
    return result.outcome


class RawServer:
    """A TCP server that answers each connection's requests with the given bytes, then maybe hangs up."""

    def __init__(self, *answers: bytes | None) -> None:
        self.requests = self.connections = 0
        self._answers = list(answers)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                while self._answers and self._read(connection):
                    answer = self._answers.pop(0)
                    if answer is None:
                        break
                    connection.sendall(answer)
                    if b"keep-alive" not in answer:
                        break

    def _read(self, connection: socket.socket) -> bool:
        got = b""
        while b'"attempt":1}}' not in got:
            piece = connection.recv(65536)
            if not piece:
                return False
            got += piece
        self.requests += 1
        return True

    def close(self) -> None:
        self._socket.close()


def tls_context(folder: Path) -> ssl.SSLContext:
    """A server certificate that nobody signed but itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(datetime.now(UTC) - timedelta(days=1)).not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = folder / "server.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem)
    return context
