"""MongoDB as a kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from evermark.sources.kinds import SourceContext, SourceKind, SourceState
from evermark.sources.mongo.settings import MongoSettings

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source


class MongoKind(SourceKind[MongoSettings]):
    settings = MongoSettings

    def make(self, settings: MongoSettings, context: SourceContext) -> Source:
        from evermark.sources.mongo.source import MongoChanges

        return MongoChanges((settings if context.box is None else settings.sealed(context.box)).target())

    def examine(
        self, settings: MongoSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        from evermark.sources.mongo.doctor import examined
        from evermark.sources.mongo.source import MongoChanges

        with closing(MongoChanges(settings.target())) as source:
            found = list(examined(source.client, source.target))
            yield from found
            if look is not None and not any(each.grade == "wrong" for each in found):
                yield from look(source).findings


KIND = MongoKind()
