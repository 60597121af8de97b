"""The settings of a replica source."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from evermark.replicas.auth import KEY_CHARS_MIN
from evermark.replicas.event import NAME
from evermark.replicas.settings import CLUSTER, is_url
from evermark.replicas.values import TABLE
from evermark.secrets import HIDDEN, Plain, Sealed, Secret, SecretBox
from evermark.settings.fields import refusal, secret_of
from evermark.sources.replica.target import ReplicaTarget
from evermark.sources.settings import SourceConfig

_TABLES_MAX = 1000
_KEY_CHARS_MAX = 1024


def _url(text: str) -> str:
    if not is_url(text):
        raise refusal("expected the address of a node, for example http://north:8440", hint="without a user")
    return text.rstrip("/")


def _key(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    if isinstance(secret, Secret) and not KEY_CHARS_MIN <= len(secret.reveal()) <= _KEY_CHARS_MAX:
        raise refusal("expected the key that `evermark replica add` printed")
    return secret


_Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


class ReplicaSourceSettings(SourceConfig):
    """`peer` is the node that is read, `node` what it knows us as: `evermark replica add NODE` on the peer."""

    type: Literal["replica"] = "replica"
    url: Annotated[str, Field(max_length=2048), AfterValidator(_url)]
    peer: _Name
    node: _Name
    cluster: Annotated[str, Field(pattern=f"^{CLUSTER.pattern}$")]
    key: Annotated[Secret | Sealed, PlainValidator(_key), PlainSerializer(lambda _: HIDDEN)]
    tables: Annotated[
        tuple[Annotated[str, Field(pattern=f"^{TABLE.pattern}$")], ...], Field(min_length=1, max_length=_TABLES_MAX)
    ]
    start: Literal["oldest", "copy"] = "oldest"

    def sealed(self, box: SecretBox) -> Self:
        if isinstance(self.key, Sealed):
            return self
        return self.model_copy(update={"key": Sealed.seal(self.key.reveal(), box)})

    def target(self) -> ReplicaTarget:
        key = self.key if isinstance(self.key, Sealed) else Plain(self.key.reveal())
        tables = tuple(sorted(set(self.tables)))
        return ReplicaTarget(self.url, self.cluster, self.node, self.peer, key, tables, self.start == "copy")

    def streams_named(self) -> frozenset[str]:
        return frozenset(self.tables)

    def listed(self) -> dict[str, Any]:
        return {"start": self.start, "peer": self.peer, "url": self.url, "tables": sorted(self.tables)}
