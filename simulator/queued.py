"""Every parked delivery, from the settlement that parked it to whatever took it out of the queue again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evermark.delivery.store.memory import MemoryDelivery
from simulator.broken import require

_PARK = frozenset({"settle_group", "settle_subscription", "replays.settle"})
_COUNTED = {"drop": "dropped", "expire": "expired", "replays.cancel": "dropped"}

# (who, event, replay) -> whether the receiver's handler had it by that delivery.
IsHandled = Callable[[str, str, str], bool]


@dataclass(frozen=True)
class _Row:
    name: str
    one: str  # who had the name when it was parked
    event_id: str
    dead: bool
    replay: str  # empty: the event's own delivery
    roomless: bool  # it was not tried, because of its session; or it is of a bot, which has a limit for each stream


class Queued:
    """Rows leave the queue when they were handled, with their subscription, or counted; no other way."""

    def __init__(self, store: MemoryDelivery) -> None:
        self._store = store
        self._seen: dict[int, _Row] = {}
        self._counts: dict[str, dict[str, int]] = {"dropped": {}, "expired": {}}
        self.refused_forever: dict[str, set[str]] = defaultdict(set)
        self.dropped: dict[str, set[str]] = defaultdict(set)
        self.parked: dict[str, set[str]] = defaultdict(set)  # ever
        self.given_up: set[tuple[str, str, str]] = set()  # deliveries of replays: (who, event, replay)

    def has(self, name: str, event_id: str, replay: str = "") -> bool:
        sought = (name, event_id, replay)
        return any((row.name, row.event_id, row.replay) == sought for row in self._seen.values())

    def dead(self, name: str) -> set[str]:
        return {row.event_id for row in self._seen.values() if row.name == name and row.dead and not row.replay}

    def after(
        self, method: str, args: tuple[Any, ...], current: Mapping[str, str], is_handled: IsHandled
    ) -> dict[str, set[str]]:
        """Look at what a write did; returns what expired in the queue, by who had it."""
        before, self._seen = self._seen, self._rows(current)
        gone = {number: row for number, row in before.items() if number not in self._seen}
        new = {number: row for number, row in self._seen.items() if number not in before}
        self._look_at_new(method, new)
        self._look_at_gone(method, args, gone, is_handled)
        for number, row in self._seen.items():
            if row.dead and (number in new or not before[number].dead):
                forever = row.event_id in self.refused_forever[row.one]
                require(forever, f"{row.one}: {row.event_id} is dead, but was not refused for ever")
        self._look_at_counts(method, gone)
        live = [row for row in gone.values() if not row.replay] if method == "expire" else []
        return {row.one: {r.event_id for r in live} for row in live}

    def _rows(self, current: Mapping[str, str]) -> dict[int, _Row]:
        found: dict[int, _Row] = {}
        for number, row in self._store.tables.rows.items():
            name, was = row.subscription, self._seen.get(number)
            dead = row.next_attempt_at is None and not row.waits
            bot = self._store.tables.known[name][0].bot if row.waits and name in current else None
            published = bot is not None and (bot.device, row.event.session) in self._store.tables.keys
            require(not published, f"{row.event.event_id} waits for a key that is published")
            require(name in current, f"{row.event.event_id} is parked for {name}, which is not there")
            one, event = was.one if was else current[name], row.event
            by_stream = self._store.tables.is_bot(name)
            roomless = bool(event.session or by_stream) and not event.replay_id
            found[number] = _Row(name, one, event.event_id, dead, event.replay_id, roomless)
            require(found[number].one == current[name], f"{name} has inherited what was parked for another")
        return found

    def _look_at_new(self, method: str, new: Mapping[int, _Row]) -> None:
        require(not new or method in _PARK, f"{method} has parked {len(new)} deliveries")
        counts = Counter((row.name, bool(row.replay)) for row in self._seen.values() if not row.roomless)
        for row in new.values():
            self.parked[row.one].add(row.event_id)
            most, count = self._store.subscription(row.name).spec.parked_max, counts[row.name, bool(row.replay)]
            require(count <= most, f"{row.name} has {count} parked; the limit is {most}")
            require(method == "replays.settle" or not row.replay, f"{method} has parked a delivery of {row.replay}")

    def _look_at_gone(
        self, method: str, args: tuple[Any, ...], gone: Mapping[int, _Row], is_handled: IsHandled
    ) -> None:
        for number, row in gone.items():
            what = f"{row.one}: {row.event_id} {row.replay}"
            if row.replay and method != "delivered":
                self.given_up.add((row.one, row.event_id, row.replay))
            if method == "delivered":
                done = is_handled(row.one, row.event_id, row.replay)
                require(number in args[0] and done, f"{what} was taken out of the queue, unhandled")
            elif method == "drop":
                require(number in args[0], f"{what} was dropped, and nobody had asked for that")
                self.dropped[row.one] |= {row.event_id} if not row.replay else set()
            elif method == "replays.cancel":
                require(row.replay == args[0], f"{what} was dropped with {args[0]}")
            else:
                require(method in ("expire", "remove") and row.name == args[0], f"{what} is lost: {method} took it")

    def _look_at_counts(self, method: str, gone: Mapping[int, _Row]) -> None:
        """`expired` is also counted with settlements; here only what the queue lost."""
        for name, count in _COUNTED.items():
            now = self._store.counted(count)
            if method == name:
                expected = Counter(self._counts[count])
                expected.update(row.name for row in gone.values())
                require(dict(expected) == now, f"{name}: {dict(expected)} {count}, counted are {now}")
        self._counts = {count: self._store.counted(count) for count in self._counts}
