"""Secrets: plain only in the process that needs them, sealed everywhere else.

- `Secret` is plain text in memory. It shows nothing and refuses to be pickled: what leaves the process is sealed.
- `KeyRef` says where the key is (`file:/run/secrets/evermark`, `env:EVERMARK_KEY`); it is not the key.
- `SecretBox` seals and opens with the key behind a reference, read when first used, never pickled.
- `Sealed` is a ciphertext with the reference to its key: what plans, options and executors may hold.

A sealed text (version 1) is `sealed:v1:<key id>:<base64url of nonce and AES-256-GCM ciphertext>`. The key id is
eight hex digits derived from the key, so that "another key" and "damaged" can be told apart.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hmac
import os
import re
import secrets as random_source
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from evermark.disk import write_whole
from evermark.errors import ConfigError, DeniedError, DiskFullError, EvermarkError, FormatError

HIDDEN = "***"
KEY_BYTES_MIN = 16
FILE_BYTES_MAX = 64 * 1024
KEY_FILE_NAME = "secrets.key"
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)

_PREFIX = "sealed:"
_SEALED = re.compile(r"sealed:v1:([0-9a-f]{8}):([A-Za-z0-9_-]+)", re.ASCII)
_NONCE_BYTES = 12
_MAKE_KEY = 'make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"'


class Secret:
    """A plain text that does not show itself. `reveal()` is the only way to it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __str__(self) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(_encode(self._text), _encode(other._text))

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __copy__(self) -> Secret:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Secret:
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a plain secret must not leave its process: seal it with SecretBox first")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], CoreSchema]) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            _as_secret, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {"type": "string", "writeOnly": True}


def _as_secret(value: object) -> Secret:
    if isinstance(value, Secret):
        return value
    if isinstance(value, str):
        return Secret(value)
    raise PydanticCustomError("string_type", "expected text")


@dataclass(frozen=True)
class KeyRef:
    """Where a key is. Safe to show, to store and to send."""

    kind: str  # file | env
    name: str

    def __post_init__(self) -> None:
        if self.kind == "file" and Path(self.name).is_absolute() and "\0" not in self.name:
            return
        if self.kind == "env" and VARIABLE.fullmatch(self.name):
            return
        raise ConfigError(
            "a key is referred to as file:/absolute/path or env:NAME",
            hint='in evermark.yaml write secrets: {key: "${file:/run/secrets/evermark}"} or {key: "${EVERMARK_KEY}"}',
        )

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"

    def read(self, what: str, environ: Mapping[str, str] | None = None, hint: str = "") -> bytes:
        """What is there, without a line end. `what`: the key of the file that it is for."""
        if self.kind == "env":
            found = _encode((os.environ if environ is None else environ).get(self.name, ""))
            missing = f"the variable {self.name} is not set"
        else:
            found = read_small_file(self.name, what)
            missing = f"the key file {self.name} is empty"
        found = found.rstrip(b"\r\n")
        if not found:
            raise ConfigError(f"{what}: {missing}", hint=hint or "every process of the deployment needs it there")
        return found

    def load(self, environ: Mapping[str, str] | None = None) -> bytes:
        """The key's bytes, without a line end. Any text of 16 bytes or more is a key."""
        key = self.read("secrets.key", environ, hint=_MAKE_KEY)
        if len(key) < KEY_BYTES_MIN:
            raise ConfigError(
                f"secrets.key: the key in {self} is too short ({KEY_BYTES_MIN} bytes at least)", hint=_MAKE_KEY
            )
        return key


class SecretBox:
    """Seals and opens with the key behind `key_ref`. Pickles as the reference alone. Thread-safe."""

    def __init__(self, key_ref: KeyRef) -> None:
        self.key_ref = key_ref
        self._derived: tuple[str, AESGCM] | None = None

    def __repr__(self) -> str:
        return "SecretBox()"

    def __reduce__(self) -> tuple[object, ...]:
        return (SecretBox, (self.key_ref,))

    def seal(self, text: str) -> str:
        key_id, cipher = self._cipher()
        nonce = random_source.token_bytes(_NONCE_BYTES)
        body = nonce + cipher.encrypt(nonce, _encode(text), _bound(key_id))
        return f"{_PREFIX}v1:{key_id}:{base64.urlsafe_b64encode(body).decode().rstrip('=')}"

    def open(self, sealed: str) -> str:
        match = _SEALED.fullmatch(sealed)
        if match is None:
            raise _not_readable(sealed)
        key_id, cipher = self._cipher()
        if match[1] != key_id:
            raise DeniedError(
                f"a secret was sealed with another key (id {match[1]}) than the one in {self.key_ref} (id {key_id})",
                hint="give the key it was sealed with as secrets.key, or set the secret anew",
            )
        try:
            body = base64.urlsafe_b64decode(match[2] + "=" * (-len(match[2]) % 4))
            text = cipher.decrypt(body[:_NONCE_BYTES], body[_NONCE_BYTES:], _bound(key_id))
            return text.decode("utf-8", "surrogatepass")
        except (InvalidTag, ValueError, binascii.Error):
            raise DeniedError(
                f"a sealed secret is damaged: it does not open with the key in {self.key_ref}",
                hint="set the secret anew",
            ) from None

    def _cipher(self) -> tuple[str, AESGCM]:
        derived = self._derived
        if derived is None:
            key = self.key_ref.load()
            derived = (_derive(key, b"evermark key id v1", 4).hex(), AESGCM(_derive(key, b"evermark sealing v1", 32)))
            self._derived = derived
        return derived


@dataclass(frozen=True, repr=False)
class Sealed:
    """A ciphertext and where its key is: picklable, and worthless without the key."""

    text: str
    key_ref: KeyRef

    @classmethod
    def seal(cls, plain: str, box: SecretBox) -> Sealed:
        return cls(box.seal(plain), box.key_ref)

    def open(self) -> str:
        """The plain text. Reads the key here, in the process that needs it."""
        return SecretBox(self.key_ref).open(self.text)

    def __repr__(self) -> str:
        return f"Sealed({HIDDEN})"


class Hidden(Protocol):
    """A text that shows itself only when opened: `Sealed`, or `Plain`."""

    def open(self) -> str: ...


@dataclass(frozen=True)
class Plain:
    """A text without a secret in it, or a test's."""

    text: str = field(repr=False)

    def open(self) -> str:
        return self.text


def opened(secret: Secret | Sealed) -> str:
    """The plain text of a secret of the file, sealed meanwhile or not."""
    return secret.reveal() if isinstance(secret, Secret) else secret.open()


def key_for(given: KeyRef | None, data: Path, *, shared_state: bool) -> tuple[KeyRef, str | None]:
    """The reference to a deployment's key, and a warning for the operator if there is something to say.

    `given` is `secrets.key` of the file. Without it the key is kept in `<data>/secrets.key`, and made there the first
    time. `shared_state`: other instances may use the same State.
    """
    if given is not None:
        return given, None
    path = data.absolute() / KEY_FILE_NAME
    ref = KeyRef("file", str(path))
    if _make_key_file(path):
        shared = " Every instance that uses the same state.dsn needs this same key." if shared_state else ""
        return ref, (
            f"secrets.key is not set: a new key was made in {path}. Keep a copy: without it the secrets kept in state "
            f"cannot be opened.{shared}"
        )
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return ref, f"the key file {path} can be read by other users: chmod 600 {path}"
    return ref, None


def read_small_file(path: str | Path, what: str) -> bytes:
    """The bytes of a small regular file. Never blocks on a pipe or a device, never reads without end."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "not a path").lower()
        raise ConfigError(
            f"{what}: cannot read the file {path}: {reason}", hint="create it, or correct the path"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{what}: {path} is not a regular file", hint="name a file that holds only the value")
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(
            f"{what}: the file {path} is larger than {FILE_BYTES_MAX} bytes",
            hint="name a file that holds only the value",
        )
    return data


def _make_key_file(path: Path) -> bool:
    """Make the key unless it exists; whether it was made."""
    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, random_source.token_urlsafe(32) + "\n", mode=0o600)
    except FileExistsError:
        return False  # another process has just made it
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise DiskFullError(f"no space left to make the key file {path}", hint="free some space") from None
        raise ConfigError(
            f"secrets.key is not set, and no key can be made in {path}: {os.strerror(error.errno or 0).lower()}",
            hint=f"make the folder writable, or set secrets.key; {_MAKE_KEY}",
        ) from None
    return True


def _not_readable(sealed: str) -> EvermarkError:
    if sealed.startswith(_PREFIX) and not sealed.startswith(f"{_PREFIX}v1:"):
        return FormatError("a secret was sealed by a newer version of this program", hint="upgrade evermark")
    return FormatError("a text that should be a sealed secret is not one", hint="set the secret anew")


def _derive(key: bytes, purpose: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=purpose).derive(key)


def _bound(key_id: str) -> bytes:
    return f"{_PREFIX}v1:{key_id}".encode()


# Variables may hold bytes that are no UTF-8; Python shows them as lone surrogates, and these must survive.
def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
