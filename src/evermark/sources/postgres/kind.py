"""Postgres as a kind of source, in its two modes: an outbox, and tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from evermark.errors import EvermarkError
from evermark.sources.kinds import Installation, Retained, SourceContext, SourceKind, SourceState
from evermark.sources.postgres.settings import PostgresSettings

if TYPE_CHECKING:
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source
    from evermark.sources.postgres.tables.source import PostgresTables


class PostgresKind(SourceKind[PostgresSettings]):
    settings = PostgresSettings
    installs = True

    def make(self, settings: PostgresSettings, context: SourceContext) -> Source:
        if settings.mode == "tables":
            return tables_of(settings, context)
        from evermark.sources.postgres.read.source import PostgresOutbox

        return PostgresOutbox((settings if context.box is None else settings.sealed(context.box)).target())

    def examine(
        self, settings: PostgresSettings, context: SourceContext, look: Callable[[Source], SourceState] | None
    ) -> Iterator[Finding]:
        if settings.mode == "tables":
            from evermark.sources.postgres.tables.doctor import examined

            wants_copies = settings.start == "copy"
            yield from examined(settings.target(), lambda: tables_of(settings, context), look, copies=wants_copies)
            return
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
        if settings.mode == "tables":
            from evermark.sources.postgres.tables.install import TablesInstallation

            return TablesInstallation(settings)
        from evermark.sources.postgres.admin.installation import OutboxInstallation

        return OutboxInstallation(settings)

    def retained(self, settings: PostgresSettings, since: Callable[[], datetime | None]) -> Retained | None:
        if settings.mode == "tables":
            return None  # tables hold rows, not events
        from evermark.sources.postgres.admin.examine import retained

        try:
            return retained(settings.target(), since())
        except EvermarkError:
            return None  # `doctor` has said that the server does not answer


def tables_of(settings: PostgresSettings, context: SourceContext) -> PostgresTables:
    """How the tables look is remembered in State, which travels in the form that the source does."""
    from evermark.sources.postgres.tables.source import PostgresTables, versions_in_state

    target = (settings if context.box is None else settings.sealed(context.box)).target()
    versions = partial(versions_in_state, context.state_dsn(), context.state_schema, context.source)
    place = context.copy_place(all_wanted=settings.start == "copy")
    return PostgresTables(target, versions, place)


KIND = PostgresKind()
