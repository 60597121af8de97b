"""The Postgres outbox as a kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from evermark.errors import EvermarkError
from evermark.sources.kinds import Installation, Retained, SourceContext, SourceKind, SourceState
from evermark.sources.postgres.place import open_partition, place_of
from evermark.sources.postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source


class PostgresKind(SourceKind[PostgresSettings]):
    settings = PostgresSettings
    installs = True

    def make(self, settings: PostgresSettings, context: SourceContext) -> Source:
        from evermark.sources.postgres.source import PostgresOutbox

        if context.box is None:
            return PostgresOutbox(open_partition(settings))
        return PostgresOutbox(place_of(settings.sealed(context.box)))

    def examine(
        self, settings: PostgresSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        from evermark.sources.postgres.doctor import judged
        from evermark.sources.postgres.examine import examine
        from evermark.sources.postgres.facts import Kept
        from evermark.sources.postgres.source import PostgresOutbox

        place = open_partition(settings)
        facts = examine(place)
        if look is None or facts.server is None:
            yield from judged(facts, place, None)
            return
        source = PostgresOutbox(place)
        try:
            state = look(source)
        finally:
            source.close()
        yield from judged(facts, place, Kept(state.owner, state.checkpoints, state.recovering))
        yield from state.findings

    def installation(self, settings: PostgresSettings) -> Installation:
        from evermark.sources.postgres.installation import OutboxInstallation

        return OutboxInstallation(settings)

    def retained(self, settings: PostgresSettings, since: Callable[[], datetime | None]) -> Retained | None:
        from evermark.sources.postgres.examine import behind

        log_newest = since()
        try:
            found = behind(open_partition(settings), log_newest)
        except EvermarkError:
            return None  # a place that does not answer has said so already
        events = found.events
        return Retained(
            events.oldest, events.newest, events.count, events.exact, found.since, found.younger, found.younger_exact
        )


KIND = PostgresKind()
