"""The backends of checkpoints: one line each. A backend is imported when a file names it."""

from __future__ import annotations

import importlib
import importlib.util
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from evermark.checkpoints.base import CheckpointStore
from evermark.errors import SetupError
from evermark.secrets import HIDDEN, Sealed, Secret, SecretBox
from evermark.settings.fields import Duration, Model, Whole, between, refusal, secret_of

if TYPE_CHECKING:
    from evermark.state.connection import State


@dataclass(frozen=True)
class Backend:
    """`opener` is a function, as `module:name`, that makes a `CheckpointStore` of the settings and of State."""

    opener: str
    durable: bool = True  # whether checkpoints outlive the process that saved them, and other processes see them
    outside: bool = False  # whether it is another server than that of State
    driver: str = ""  # the module it needs, which the extra of the backend's name installs


BACKENDS = {
    "postgres": Backend("evermark.checkpoints.stores:open_in_state"),
    "etcd": Backend("evermark.checkpoints.etcd:open_in_etcd", outside=True, driver="etcd3gw"),
    "mongo": Backend("evermark.checkpoints.mongo:open_in_mongo", outside=True, driver="pymongo"),
    "memory": Backend("evermark.checkpoints.stores:open_in_memory", durable=False),
}

_PREFIX = re.compile(r"/?(?:[A-Za-z0-9_.$-]+/)+", re.ASCII)


def _registered(name: str) -> str:
    if name not in BACKENDS:
        raise refusal(f"expected one of {', '.join(BACKENDS)}")
    return name


def _endpoint(text: str) -> str:
    try:
        at = urlsplit(text)
        whole = at.scheme in {"http", "https"} and at.hostname and at.port != 0
    except ValueError:
        whole = False
    if not whole or "@" in text or at.path.strip("/") or at.query:
        raise refusal(
            "expected the address of a member, for example http://127.0.0.1:2379",
            hint="a user and a password have keys of their own: user, password",
        )
    return text


def _prefix(text: str) -> str:
    if not _PREFIX.fullmatch(text) or len(text) > 512:
        raise refusal("expected names that end with /, for example /shop/checkpoints/")
    return text


def _absolute(text: str) -> str:
    if not Path(text).is_absolute() or "\0" in text:
        raise refusal("expected the absolute path of a file")
    return text


def _mongo_url(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    if isinstance(secret, Secret):
        text = secret.reveal()
        if not text.startswith(("mongodb://", "mongodb+srv://")) or len(text) > 4096 or "\0" in text:
            raise refusal("expected the address of a deployment, for example mongodb://user:password@host:27017/")
    return secret


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Hidden = PlainSerializer(lambda _: HIDDEN)
_File = Annotated[str, Field(max_length=1024), AfterValidator(_absolute)]


class EtcdConfig(Model):
    """Where etcd is. Keys are `<prefix><source>/partition-<number>`; without a prefix, it names the deployment."""

    endpoints: Annotated[
        tuple[Annotated[str, AfterValidator(_endpoint)], ...],
        BeforeValidator(_one_or_more),
        Field(min_length=1, max_length=100),
    ] = ("http://127.0.0.1:2379",)
    prefix: Annotated[str, AfterValidator(_prefix)] | None = None
    user: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    password: Annotated[Secret | Sealed, PlainValidator(secret_of), _Hidden] | None = None
    ca: _File | None = None
    cert: _File | None = None
    key: _File | None = None

    @model_validator(mode="after")
    def _come_together(self) -> Self:
        for one, other in (("user", "password"), ("cert", "key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise refusal(f"{one} and {other} come together", at=(one,))
        return self

    def sealed(self, box: SecretBox) -> Self:
        given = self.password
        if not isinstance(given, Secret):
            return self
        return self.model_copy(update={"password": Sealed.seal(given.reveal(), box)})


class MongoConfig(Model):
    """Where MongoDB is: on this machine, if no url is given. Documents have `_id: <source>/partition-<number>`."""

    url: Annotated[Secret | Sealed, PlainValidator(_mongo_url), _Hidden] | None = None
    database: Annotated[str, Field(pattern=r'^[^/\\. "$*<>:|?\x00]{1,63}$')] | None = None
    collection: Annotated[str, Field(pattern=r"^[^$\x00]{1,200}$")] = "checkpoints"

    def sealed(self, box: SecretBox) -> Self:
        given = self.url
        return self.model_copy(update={"url": Sealed.seal(given.reveal(), box)}) if isinstance(given, Secret) else self


class CheckpointConfig(Model):
    """At the latest every `interval` or `event_count` events, whichever comes first.

    A backend in State is saved with every commit of the log, in the same transaction.
    """

    backend: Annotated[str, AfterValidator(_registered)] = "postgres"
    interval: Annotated[Duration, between(timedelta(milliseconds=10), timedelta(hours=1))] = timedelta(seconds=5)
    event_count: Annotated[Whole, Field(ge=1, le=10_000_000)] = 1000
    etcd: EtcdConfig = EtcdConfig()
    mongo: MongoConfig = MongoConfig()

    def sealed(self, box: SecretBox) -> Self:
        """With every secret sealed: the form that may travel to the processes of Spark."""
        return self.model_copy(update={"etcd": self.etcd.sealed(box), "mongo": self.mongo.sealed(box)})


def backend_of(settings: CheckpointConfig) -> Backend:
    return BACKENDS[settings.backend]


def open_checkpoints(settings: CheckpointConfig, state: State) -> CheckpointStore:
    """The checkpoints of a deployment, read and saved through `state` where the backend keeps them there."""
    backend = backend_of(settings)
    if backend.driver and importlib.util.find_spec(backend.driver) is None:
        raise SetupError(
            f"reliability.checkpoint.backend: {settings.backend} needs {backend.driver}",
            hint=f"pip install 'evermark[{settings.backend}]'",
        )
    module, _, name = backend.opener.partition(":")
    store: CheckpointStore = getattr(importlib.import_module(module), name)(settings, state)
    return store
