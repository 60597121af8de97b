"""MongoDB as a kind of source."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from evermark.errors import SetupError
from evermark.observe.finding import Finding, wrong
from evermark.sources.kinds import SourceContext, SourceKind, SourceState
from evermark.sources.mongo.settings import MongoSettings

if TYPE_CHECKING:
    from evermark.sources.base import Source


def _require_driver() -> None:
    if importlib.util.find_spec("pymongo") is None:
        raise SetupError("a source of type mongo needs pymongo", hint="pip install 'evermark[mongo]'")


class MongoKind(SourceKind[MongoSettings]):
    settings = MongoSettings

    def make(self, settings: MongoSettings, context: SourceContext) -> Source:
        _require_driver()
        from evermark.sources.mongo.source import MongoChanges

        target = (settings if context.box is None else settings.sealed(context.box)).target()
        return MongoChanges(target, context.copy_place(all_wanted=settings.start == "copy"))

    def examine(
        self, settings: MongoSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        try:
            _require_driver()
        except SetupError as error:
            yield wrong("driver", error.message, error.hint)
            return
        from evermark.sources.mongo.doctor import examined
        from evermark.sources.mongo.source import MongoChanges

        with closing(MongoChanges(settings.target())) as source:
            found = list(examined(source.client, source.target, copies=settings.start == "copy"))
            yield from found
            if look is not None and not any(each.grade == "wrong" for each in found):
                yield from look(source).findings


KIND = MongoKind()
