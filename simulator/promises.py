"""What each subscription was promised: from where on, which events, in which order.

A filter may change while a batch is on its way. What every filter wanted that was in force between the taking of a
batch and its settlement is owed; what none of them wanted is never sent; what they disagree about may be either. A
turn of the follower goes by what was asked for when it looked, also for batches that were taken since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from evermark.delivery.model import BEGINNING, CursorVector, SourcePartition, SubscriptionSpec
from evermark.event import Op
from simulator.source import Row, SimLog

_IDENTITY = "identity"


def identified(spec: SubscriptionSpec, identity: str) -> SubscriptionSpec:
    """The spec with a mark that tells it from any other of its name: requests carry it, whenever they come."""
    return replace(spec, headers={_IDENTITY: identity})


def who(spec: SubscriptionSpec) -> str:
    return spec.headers.get(_IDENTITY, spec.name)


def wants(spec: SubscriptionSpec, row: Row) -> bool:
    return (
        row.op != Op.CONTROL
        and (not spec.streams or row.stream in spec.streams)
        and (not spec.ops or row.op in spec.ops)
    )


def gets(spec: SubscriptionSpec, row: Row) -> bool:
    """The same for bots, by what the source knows of them."""
    return wants(spec, row) and (spec.bot is None or (row.about.member and row.place.source == spec.bot.source))


@dataclass(frozen=True)
class Wish:
    """What a subscription asked for, and how long the log was by then: later batches were taken under this wish."""

    spec: SubscriptionSpec
    since: Mapping[SourcePartition, int]

    @property
    def terms(self) -> tuple[object, ...]:
        return self.spec.streams, self.spec.ops, self.spec.ordered


class Promises:
    """By `who`, for all that ever were: a request made for one that was removed may still be on its way."""

    def __init__(self, logs: Mapping[str, SimLog]) -> None:
        self._logs = logs
        self.starts: dict[str, CursorVector] = {}
        self._wishes: dict[str, list[Wish]] = {}

    def begin(self, spec: SubscriptionSpec, start: CursorVector) -> None:
        self.starts[who(spec)] = dict(start)
        self._wishes[who(spec)] = [Wish(spec, self._tails())]

    def change(self, spec: SubscriptionSpec) -> None:
        self._wishes[who(spec)].append(Wish(spec, self._tails()))

    def asked(self, one: str) -> SubscriptionSpec:
        """What it asks for now."""
        return self._wishes[one][-1].spec

    def changes(self, one: str) -> int:
        return len(self._wishes.get(one, ()))

    def wishes_from(self, one: str, number: int) -> list[SubscriptionSpec]:
        """What it asked for since it had changed its mind so many times."""
        return [wish.spec for wish in self._wishes[one][max(0, number - 1) :]]

    def owes(self, one: str, row: Row) -> bool:
        return all(gets(wish.spec, row) for wish in self._in_force(one, row))

    def may_send(self, one: str, row: Row, *, early: bool = False) -> bool:
        """`early`: events from before its start are forgiven."""
        return (early or self.has_begun(one, row)) and any(gets(wish.spec, row) for wish in self._in_force(one, row))

    def has_begun(self, one: str, row: Row) -> bool:
        return row.batch > self.starts[one].get(row.place, BEGINNING).batch

    def has_order(self, one: str, row: Row) -> bool:
        """Whether the first deliveries of a key follow the log here: not where what was asked for changed meanwhile."""
        return len({wish.terms for wish in self._in_force(one, row)}) == 1

    def is_ordered(self, one: str, row: Row) -> bool:
        return self.has_order(one, row) and self._in_force(one, row)[-1].spec.ordered

    def _in_force(self, one: str, row: Row) -> list[Wish]:
        """The wishes at any time since the row was taken."""
        wishes = self._wishes[one]
        return [
            wish
            for number, wish in enumerate(wishes)
            if wish is wishes[-1] or row.batch <= wishes[number + 1].since.get(row.place, 0)
        ]

    def _tails(self) -> dict[SourcePartition, int]:
        logged = ((source, append) for source, log in self._logs.items() for append in log.commits)
        return {SourcePartition(source, append.partition): append.batch for source, append in logged}
