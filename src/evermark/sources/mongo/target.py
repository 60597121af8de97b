"""Which documents of a MongoDB deployment are read, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from evermark.secrets import Hidden

if TYPE_CHECKING:
    from evermark.sources.mongo.hidden import HiddenFields

PARTITIONS_MAX = 16

AfterImages = Literal["lookup", "stored", "required", "changes"]
BeforeImages = Literal["none", "stored", "required"]


@dataclass(frozen=True)
class MongoTarget:
    """Picklable as far as its url is."""

    url: Hidden
    database: str | None = None  # None: the whole deployment
    collections: tuple[str, ...] = ()  # as streams are called, `database.collection`; empty: all of them
    partitions: int = 1
    after: AfterImages = "lookup"
    before: BeforeImages = "none"
    oldest: bool = False  # begin with the oldest change that the oplog has, not with the next one
    hidden: Mapping[str, HiddenFields] = field(default_factory=dict)  # by stream
    far_s: int = 10  # much that is so many seconds old is read side by side; the rest comes by itself

    def wants(self, stream: str) -> bool:
        is_here = self.database is None or stream.startswith(f"{self.database}.")
        return is_here and (not self.collections or stream in self.collections)
