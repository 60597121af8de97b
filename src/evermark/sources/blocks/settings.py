"""The settings of a block source."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PlainSerializer, PlainValidator

from evermark.secrets import HIDDEN, Sealed, Secret, SecretBox
from evermark.settings.fields import Duration, between, refusal, secret_of
from evermark.sources.blocks.chain import StreamKind
from evermark.sources.blocks.target import NODES_MAX, PARTITIONS_MAX, is_node_url
from evermark.sources.settings import SourceConfig

_STREAMS_MAX = 10_000
_TOKEN = re.compile(r"[ -~]{1,1024}")


def _node(url: str) -> str:
    if not is_node_url(url):
        raise refusal(
            "expected the address of a node, for example http://127.0.0.1:8330", hint="a token goes under token:"
        )
    return url.rstrip("/")


def _token(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    if isinstance(secret, Secret) and not _TOKEN.fullmatch(secret.reveal()):
        raise refusal("expected a token of up to 1024 plain characters")
    return secret


_Url = Annotated[str, Field(min_length=8), AfterValidator(_node)]
_Stream = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]


class BlocksSettings(SourceConfig):
    type: Literal["blocks"] = "blocks"
    nodes: Annotated[tuple[_Url, ...], Field(min_length=1, max_length=NODES_MAX)]
    token: Annotated[Secret | Sealed, PlainValidator(_token), PlainSerializer(lambda _: HIDDEN)] | None = None
    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_MAX)] = 1
    streams: Annotated[tuple[_Stream, ...], Field(max_length=_STREAMS_MAX)] = ()
    kinds: Annotated[tuple[StreamKind, ...], Field(max_length=len(StreamKind))] = ()
    streams_of: Literal["all", "bots"] = "all"
    start: Literal["beginning", "snapshot"] = "beginning"
    cold_streams_enabled: bool = False
    idle_after: Annotated[Duration, between(timedelta(minutes=1), timedelta(days=365))] = timedelta(hours=6)
    keep_unwanted: Annotated[Duration, between(timedelta(hours=1), timedelta(days=3660))] = timedelta(days=30)
    requests_per_s: Annotated[float, Field(gt=0, le=100_000)] = 500.0

    def sealed(self, box: SecretBox) -> Self:
        if self.token is None or isinstance(self.token, Sealed):
            return self
        return self.model_copy(update={"token": Sealed.seal(self.token.reveal(), box)})

    def listed(self) -> dict[str, Any]:
        return {"start": self.start, "nodes": self.nodes}
