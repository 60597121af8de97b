"""The Postgres outbox as a kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from evermark.errors import EvermarkError
from evermark.sources.kinds import Installation, Retained, SourceContext, SourceKind, SourceState
from evermark.sources.postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source


class PostgresKind(SourceKind[PostgresSettings]):
    settings = PostgresSettings
    installs = True

    def make(self, settings: PostgresSettings, context: SourceContext) -> Source:
        from evermark.sources.postgres.read.source import PostgresOutbox

        return PostgresOutbox((settings if context.box is None else settings.sealed(context.box)).target())

    def examine(
        self, settings: PostgresSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        from evermark.sources.postgres.admin.doctor import judged
        from evermark.sources.postgres.admin.examine import examine
        from evermark.sources.postgres.admin.facts import Kept
        from evermark.sources.postgres.read.source import PostgresOutbox

        target = settings.target()
        facts = examine(target)
        if look is None or facts.server is None:
            yield from judged(facts, target, None)
            return
        source = PostgresOutbox(target)
        try:
            state = look(source)
        finally:
            source.close()
        yield from judged(facts, target, Kept(state.owner, state.checkpoints, state.recovering))
        yield from state.findings

    def installation(self, settings: PostgresSettings) -> Installation:
        from evermark.sources.postgres.admin.installation import OutboxInstallation

        return OutboxInstallation(settings)

    def retained(self, settings: PostgresSettings, since: Callable[[], datetime | None]) -> Retained | None:
        from evermark.sources.postgres.admin.examine import behind

        log_newest = since()
        try:
            found = behind(settings.target(), log_newest)
        except EvermarkError:
            return None  # a place that does not answer has said so already
        events = found.events
        return Retained(
            events.oldest, events.newest, events.count, events.exact, found.since, found.younger, found.younger_exact
        )


KIND = PostgresKind()
