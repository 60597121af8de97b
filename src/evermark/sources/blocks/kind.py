"""Block streams as a kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from evermark.secrets import Plain
from evermark.sources.blocks.settings import BlocksSettings
from evermark.sources.kinds import SourceContext, SourceKind, SourceState

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source
    from evermark.sources.blocks.target import BlocksTarget


class BlocksKind(SourceKind[BlocksSettings]):
    settings = BlocksSettings

    def make(self, settings: BlocksSettings, context: SourceContext) -> Source:
        from evermark.sources.blocks.source import BlockStreams

        return BlockStreams(place_in(settings, context))

    def examine(
        self, settings: BlocksSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        from evermark.sources.blocks.doctor import asked, judged, judged_streams
        from evermark.sources.blocks.source import BlockStreams

        place = place_in(settings, context)
        yield from judged(asked(place))
        if look is None:
            return
        source = BlockStreams(place)
        try:
            yield from judged_streams(source.plans, place)
            yield from look(source).findings
        finally:
            source.close()


def place_in(settings: BlocksSettings, context: SourceContext) -> BlocksTarget:
    """The place that the settings describe, with its secrets sealed if the context has a box for them."""
    from evermark.sources.blocks.bots import BotsInState
    from evermark.sources.blocks.target import place_of

    name, state = context.source, (context.state_dsn(), context.state_schema)
    bots = BotsInState(*state, name, context.bots.users, context.bots.inboxes, context.bots.version)
    if context.box is not None:
        return place_of(name, settings.sealed(context.box), *state, bots=bots)
    token = settings.open_token()
    return place_of(name, settings, *state, Plain(token) if token is not None else None, bots)


KIND = BlocksKind()
