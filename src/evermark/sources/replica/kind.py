"""Replicas as a kind of source."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from evermark.sources.kinds import SourceContext, SourceKind
from evermark.sources.replica.settings import ReplicaSourceSettings

if TYPE_CHECKING:
    from evermark.sources.base import Source


class ReplicaKind(SourceKind[ReplicaSourceSettings]):
    settings = ReplicaSourceSettings

    def make(self, settings: ReplicaSourceSettings, context: SourceContext) -> Source:
        from evermark.sources.replica.source import ReplicaTables, open_plans

        target = (settings if context.box is None else settings.sealed(context.box)).target()
        return ReplicaTables(target, partial(open_plans, context.state_dsn(), context.state_schema, context.source))


KIND = ReplicaKind()
