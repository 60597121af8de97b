"""Which documents of a MongoDB deployment are read, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evermark.secrets import Hidden

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

    def wants(self, stream: str) -> bool:
        return not self.collections or stream in self.collections
