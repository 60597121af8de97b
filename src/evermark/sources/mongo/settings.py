"""The settings of a MongoDB source."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from evermark.secrets import HIDDEN, Plain, Sealed, Secret, SecretBox
from evermark.settings.fields import NotYet, refusal
from evermark.sources.mongo.target import PARTITIONS_MAX, AfterImages, BeforeImages, MongoTarget
from evermark.sources.settings import SourceConfig, secret_of

_URL_CHARS_MAX = 4096
_SCHEMES = ("mongodb://", "mongodb+srv://")


def _url(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    if isinstance(secret, Secret):
        text = secret.reveal()
        if not text.startswith(_SCHEMES) or len(text) > _URL_CHARS_MAX or "\0" in text:
            raise refusal("expected the address of a deployment, for example mongodb://user:password@host:27017/")
    return secret


_Database = Annotated[str, Field(pattern=r'^[^/\\. "$*<>:|?\x00]{1,63}$')]
_Collection = Annotated[str, Field(pattern=r"^[^$\x00]{1,255}$")]
_NO_COPY = NotYet(
    "copy is not in this version: documents from before the first start are not taken", "use now", ("copy",)
)


class MongoSettings(SourceConfig):
    type: Literal["mongo"] = "mongo"
    url: Annotated[Secret | Sealed, PlainValidator(_url), PlainSerializer(lambda _: HIDDEN)]
    database: _Database | None = None
    collections: Annotated[tuple[_Collection, ...], Field(max_length=1000)] = ()
    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_MAX)] = 1
    full_documents: AfterImages = "lookup"
    before_images: BeforeImages = "none"
    start: Annotated[Literal["now", "oldest", "copy"], _NO_COPY] = "now"

    @model_validator(mode="after")
    def _collections_have_a_database(self) -> Self:
        for index, name in enumerate(self.collections):
            if self.database is None and ("." not in name or not all(name.split(".", 1))):
                raise refusal(
                    "expected database.collection",
                    hint="or name the database under database:",
                    at=("collections", index),
                )
        return self

    def sealed(self, box: SecretBox) -> Self:
        if isinstance(self.url, Sealed):
            return self
        return self.model_copy(update={"url": Sealed.seal(self.url.reveal(), box)})

    def target(self) -> MongoTarget:
        return MongoTarget(
            self.url if isinstance(self.url, Sealed) else Plain(self.url.reveal()),
            self.database,
            tuple(sorted(self.streams_named())),
            self.partitions,
            self.full_documents,
            self.before_images,
            self.start == "oldest",
        )

    def streams_named(self) -> frozenset[str]:
        return frozenset(name if self.database is None else f"{self.database}.{name}" for name in self.collections)

    def listed(self) -> dict[str, Any]:
        named = {"start": self.start, "database": self.database, "collections": sorted(self.streams_named())}
        return {**named, "partitions": self.partitions, "full_documents": self.full_documents}
