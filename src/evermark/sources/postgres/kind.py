"""The Postgres outbox as a kind of source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
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
        from evermark.sources.postgres.read.source import PostgresOutbox

        target = settings.target()
        facts = examine(target)
        if look is None or facts.server is None:
            yield from judged(facts, target, None)
            return
        with closing(PostgresOutbox(target)) as source:
            state = look(source)
        yield from judged(facts, target, state)
        yield from state.findings

    def installation(self, settings: PostgresSettings) -> Installation:
        from evermark.sources.postgres.admin.installation import OutboxInstallation

        return OutboxInstallation(settings)

    def retained(self, settings: PostgresSettings, since: Callable[[], datetime | None]) -> Retained | None:
        from evermark.sources.postgres.admin.examine import retained

        try:
            return retained(settings.target(), since())
        except EvermarkError:
            return None  # `doctor` has said that the server does not answer


KIND = PostgresKind()
