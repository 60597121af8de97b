"""Block streams as a kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from evermark.secrets import Plain, Secret
from evermark.sources.blocks.settings import BlocksSettings
from evermark.sources.kinds import SourceContext, SourceKind, SourceState

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source
    from evermark.sources.blocks.stream_choice import StreamChoice
    from evermark.sources.blocks.target import BlocksTarget


class BlocksKind(SourceKind[BlocksSettings]):
    settings = BlocksSettings

    def make(self, settings: BlocksSettings, context: SourceContext) -> Source:
        from evermark.sources.blocks.source import BlockStreams

        return BlockStreams(target_of(settings, context))

    def examine(
        self, settings: BlocksSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        from evermark.sources.blocks.doctor import about_nodes, about_streams
        from evermark.sources.blocks.source import BlockStreams

        target = target_of(settings, context)
        yield from about_nodes(target)
        if look is None:
            return
        with closing(BlockStreams(target)) as source:
            yield from about_streams(source.plans, target)
            yield from look(source).findings


def target_of(settings: BlocksSettings, context: SourceContext) -> BlocksTarget:
    """The target that the settings describe, with its token sealed if the context has a box for it."""
    from evermark.sources.blocks.stream_choice import BotsInState, BotStreams, ChosenStreams
    from evermark.sources.blocks.target import BlocksTarget, Pace

    name, state = context.source, (context.state_dsn(), context.state_schema)
    token = settings.sealed(context.box).token if context.box is not None else settings.token
    hidden = Plain(token.reveal()) if isinstance(token, Secret) else token
    named = ChosenStreams(frozenset(settings.streams), frozenset(settings.kinds))
    choice: StreamChoice = named
    if settings.streams_of == "bots":
        choice = BotStreams(BotsInState(*state, name, context.bots), named)
    return BlocksTarget(
        name,
        settings.nodes,
        *state,
        hidden,
        partitions=settings.partitions,
        choice=choice,
        whole=settings.start == "beginning",
        cold=settings.cold_streams_enabled,
        idle_after_s=settings.idle_after.total_seconds(),
        keep_unwanted_s=settings.keep_unwanted.total_seconds(),
        pace=Pace(requests_per_s=settings.requests_per_s),
    )


KIND = BlocksKind()
