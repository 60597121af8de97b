"""The settings of a MongoDB source."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from evermark.secrets import HIDDEN, Plain, Sealed, Secret, SecretBox
from evermark.settings.fields import Model, refusal, secret_of
from evermark.sources.mongo.target import PARTITIONS_MAX, AfterImages, BeforeImages, MongoTarget
from evermark.sources.settings import SourceConfig

_URL_CHARS_MAX = 4096
_SCHEMES = ("mongodb://", "mongodb+srv://")


def _url(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    if isinstance(secret, Secret):
        text = secret.reveal()
        if not text.startswith(_SCHEMES) or len(text) > _URL_CHARS_MAX or "\0" in text:
            raise refusal("expected the address of a deployment, for example mongodb://user:password@host:27017/")
    return secret


def _field(path: str) -> str:
    if not all(path.split(".")) or path.split(".", maxsplit=1)[0] == "_id":
        raise refusal("expected a field, for example address.street; _id is the key, and cannot be hidden")
    return path


def _collection(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


_Database = Annotated[str, Field(pattern=r'^[^/\\. "$*<>:|?\x00]{1,63}$')]
_Collection = Annotated[str, Field(pattern=r"^[^$\x00]{1,255}$")]
_Field = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_field)]


class CollectionSettings(Model):
    """One collection: its name, fields left out, and fields of which only a hash is taken."""

    name: _Collection
    exclude: Annotated[tuple[_Field, ...], Field(max_length=1000)] = ()
    hash: Annotated[tuple[_Field, ...], Field(max_length=1000)] = ()


class MongoSettings(SourceConfig):
    type: Literal["mongo"] = "mongo"
    url: Annotated[Secret | Sealed, PlainValidator(_url), PlainSerializer(lambda _: HIDDEN)]
    database: _Database | None = None
    collections: Annotated[
        tuple[Annotated[CollectionSettings, BeforeValidator(_collection)], ...], Field(max_length=1000)
    ] = ()
    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_MAX)] = 1
    full_documents: AfterImages = "lookup"
    before_images: BeforeImages = "none"
    start: Literal["now", "oldest", "copy"] = "now"

    @model_validator(mode="after")
    def _collections_have_a_database(self) -> Self:
        if self.start == "copy" and not self.collections:
            hint = "name them under collections: each is copied once, and one that is added later, then"
            raise refusal("copy is for collections that the file names", hint=hint, at=("start",))
        seen: set[str] = set()
        for index, each in enumerate(self.collections):
            at = ("collections", index, "name")
            if self.database is None and not all(each.name.partition(".")):
                raise refusal("expected database.collection", hint="or name the database under database:", at=at)
            if each.name in seen:
                raise refusal("this collection stands here twice", hint="keep one of them", at=at)
            seen.add(each.name)
        return self

    def sealed(self, box: SecretBox) -> Self:
        if isinstance(self.url, Sealed):
            return self
        return self.model_copy(update={"url": Sealed.seal(self.url.reveal(), box)})

    def target(self) -> MongoTarget:
        from evermark.sources.mongo.hidden import HiddenFields  # here: it needs the driver

        return MongoTarget(
            self.url if isinstance(self.url, Sealed) else Plain(self.url.reveal()),
            self.database,
            tuple(sorted(self.streams_named())),
            self.partitions,
            self.full_documents,
            self.before_images,
            self.start == "oldest",
            {self.stream_of(c): HiddenFields(c.exclude, c.hash) for c in self.collections if c.exclude or c.hash},
        )

    def streams_named(self) -> frozenset[str]:
        return frozenset(map(self.stream_of, self.collections))

    def stream_of(self, collection: CollectionSettings) -> str:
        return collection.name if self.database is None else f"{self.database}.{collection.name}"

    def listed(self) -> dict[str, Any]:
        named = {"start": self.start, "database": self.database, "collections": sorted(self.streams_named())}
        return {**named, "partitions": self.partitions, "full_documents": self.full_documents}
