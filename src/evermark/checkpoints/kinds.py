"""The backends of checkpoints: one line each. A backend is imported when a file names it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from evermark.checkpoints.base import CheckpointStore
from evermark.errors import SetupError
from evermark.etcd.settings import EtcdConfig
from evermark.secrets import HIDDEN, Sealed, Secret, SecretBox
from evermark.settings.fields import Duration, Model, Whole, between, refusal, secret_of

if TYPE_CHECKING:
    from evermark.state.connection import State


@dataclass(frozen=True)
class Backend:
    """`opener` is a function, as `module:name`, that makes a `CheckpointStore` of the settings and of State.

    `looker` is one that raises if the store cannot be read, given the settings and the schema of State; and, if it is
    told that there is no State yet, if what is there belongs to another. It makes nothing.
    """

    opener: str
    durable: bool = True  # whether checkpoints outlive the process that saved them, and other processes see them
    looker: str = ""  # of a server that is another than that of State
    driver: str = ""  # the module it needs, which the extra of the backend's name installs

    @property
    def outside(self) -> bool:
        """Whether it is another server than that of State."""
        return bool(self.looker)


BACKENDS = {
    "postgres": Backend("evermark.checkpoints.stores:open_in_state"),
    "etcd": Backend(
        "evermark.checkpoints.etcd:open_in_etcd", looker="evermark.checkpoints.etcd:look", driver="etcd3gw"
    ),
    "mongo": Backend(
        "evermark.checkpoints.mongo:open_in_mongo", looker="evermark.checkpoints.mongo:look", driver="pymongo"
    ),
    "memory": Backend("evermark.checkpoints.stores:open_in_memory", durable=False),
}


def _registered(name: str) -> str:
    if name not in BACKENDS:
        raise refusal(f"expected one of {', '.join(BACKENDS)}")
    return name


def _mongo_url(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    if isinstance(secret, Secret):
        text = secret.reveal()
        if not text.startswith(("mongodb://", "mongodb+srv://")) or len(text) > 4096 or "\0" in text:
            raise refusal("expected the address of a deployment, for example mongodb://user:password@host:27017/")
    return secret


_Hidden = PlainSerializer(lambda _: HIDDEN)


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
    store: CheckpointStore = _function(settings, backend_of(settings).opener)(settings, state)
    return store


def look_at_checkpoints(settings: CheckpointConfig, schema: str, *, is_new: bool) -> None:
    """Raise if the store, which is another server than that of State, cannot be used. State is not asked: it may not be
    there yet (`is_new`), or be away.
    """
    _function(settings, backend_of(settings).looker)(settings, schema, is_new)


def _function(settings: CheckpointConfig, named: str) -> Callable[..., Any]:
    backend = backend_of(settings)
    if backend.driver and importlib.util.find_spec(backend.driver) is None:
        raise SetupError(
            f"reliability.checkpoint.backend: {settings.backend} needs {backend.driver}",
            hint=f"pip install 'evermark[{settings.backend}]'",
        )
    module, _, name = named.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found
