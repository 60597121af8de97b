"""The plan of a replica, kept in State: one row a source, changed by compare-and-set, by its owner alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from evermark.errors import BusyError
from evermark.sources.replica.plan import Plan, as_json, check_owner, from_json
from evermark.state.connection import State

_TRIES = 20


class Plans(Protocol):
    """Two owners may change the plan at the same time: each change is made to the plan that the other left, and none
    is made once a later owner has made one."""

    def load(self) -> Plan | None: ...

    def change(self, epoch: int, to: Callable[[Plan | None], Plan]) -> Plan:
        """`to` may be called again, with another plan. `StaleError` if the epoch is over."""
        ...

    def close(self) -> None: ...


class StatePlans:
    """`Plans` in State."""

    def __init__(self, state: State, source: str, on_close: Callable[[], None]) -> None:
        self._state, self._source, self._on_close = state, source, on_close

    def load(self) -> Plan | None:
        return self._load()[1]

    def _load(self) -> tuple[int, Plan | None]:
        with self._state.connection() as conn:
            asked = "select version, plan from replica_plans where source = %s"
            row = conn.execute(asked, (self._source,)).fetchone()
        return (0, None) if row is None else (int(row[0]), from_json(json.loads(row[1])))

    def change(self, epoch: int, to: Callable[[Plan | None], Plan]) -> Plan:
        for _ in range(_TRIES):
            version, before = self._load()
            check_owner(before, epoch)
            after = replace(to(before), epoch=epoch)
            if after == before or self._saved(version, after):
                return after
        raise BusyError(f"the plan of {self._source} changes all the time", hint="do two instances read this source?")

    def _saved(self, version: int, plan: Plan) -> bool:
        with self._state.connection() as conn:
            done = conn.execute(
                """insert into replica_plans as p (source, version, plan) values (%s, %s, %s)
                on conflict (source) do update set version = excluded.version, plan = excluded.plan
                where p.version = excluded.version - 1""",
                (self._source, version + 1, json.dumps(as_json(plan))),
            )
            return done.rowcount == 1

    def close(self) -> None:
        self._on_close()
