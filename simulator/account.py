"""What each subscription is owed and what became of it, looked at after every request and every write that landed."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from evermark.cluster.memory import MemoryLeases
from evermark.delivery.model import (
    Cursor,
    CursorVector,
    Fate,
    MadeBy,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    SubscriptionState,
)
from evermark.delivery.store.memory import MemoryDelivery
from evermark.event import Op
from evermark.log.head import MemoryHeads
from simulator.broken import Broken, require
from simulator.keys import Keys
from simulator.promises import Promises, who
from simulator.queued import Queued
from simulator.source import Row, SimLog
from simulator.standings import Standings
from simulator.truth import require_epoch

_EPOCH_AT = {"expire": 3, "expire_surplus": 2, "release_keyed": 1}


class Account:
    """Knows what was promised to whom and everything that any receiver did. Keys are those of `promises.who`."""

    def __init__(
        self,
        logs: Mapping[str, SimLog],
        leases: MemoryLeases,
        heads: MemoryHeads,
        store: MemoryDelivery,
        rng: random.Random,
        clock: Callable[[], datetime],
    ) -> None:
        self._logs = logs
        self._leases = leases
        self._heads = heads
        self._store = store
        self.promises = Promises(logs)
        self.keys = Keys(rng, clock)
        self.standings = Standings(clock)
        self.queued = Queued(store)
        self.handled: dict[str, set[str]] = defaultdict(set)
        self.replayed: dict[tuple[str, str], set[str]] = defaultdict(set)  # by replays: (who, replay)
        self.live_failed: set[str] = set()  # whose own deliveries met a failing endpoint in the queue
        self.expired: dict[str, set[str]] = defaultdict(set)  # passed over because of the TTL, as far as reported
        self.owed: dict[str, set[str]] = defaultdict(set)  # what a cursor has passed
        self.duplicates: Counter[str] = Counter()
        self.current: dict[str, str] = {}  # who has which name
        self.by_generation: dict[int, str] = {}
        self.ever_disabled: set[str] = set()
        self.met: Counter[str] = Counter()  # writes, states and fates: what this seed was about
        self._passed: dict[str, dict[SourcePartition, Cursor]] = {}
        self._offered: dict[str, set[str]] = defaultdict(set)
        self._offered_to: dict[tuple[str, SourcePartition, str, str], str] = {}
        self._handled_to: dict[tuple[str, SourcePartition, str, str], str] = {}

    # requests

    def before_offer(self, spec: SubscriptionSpec, row: Row, *, stale: bool) -> None:
        """A request is about to reach a receiver. A stale owner may take a new subscription for its former self."""
        one, bound_to_start = who(spec), not stale
        require(row.op != Op.CONTROL, f"{one} was sent {row.event_id}, a control event")
        head = self._heads.load(row.place.source).get(row.place.partition)
        durable = self._logs[row.place.source].durable_batch(row.place.partition)
        bound = min(durable, head.batch if head else 0)
        require(row.batch <= bound, f"{row.event_id} of batch {row.batch} delivered; the durable head is {bound}")
        require(
            self.promises.may_send(one, row, early=not bound_to_start),
            f"{one} was sent {row.event_id} of batch {row.batch}, which it never asked for",
        )
        needs = row.about.session if spec.bot is not None else ""
        published = spec.bot is not None and (spec.bot.device, needs) in self._store.tables.keys
        require(not needs or published, f"{one} was sent {row.event_id}, and the key of {needs} is not published")
        if row.event_id in self._offered[one] or not self._has_order(spec, row):
            return
        self._offered[one].add(row.event_id)
        # What waits for a key holds its session back, whatever its keys are, and nothing else.
        for line in [(row.place, "", needs)] if needs else row.keys:
            last = self._offered_to.get((one, *line), "")
            require(row.position > last, f"{one}: {row.event_id} first offered after {last} of its key")
            self._offered_to[one, *line] = row.position

    def on_handled(self, spec: SubscriptionSpec, row: Row) -> None:
        one = who(spec)
        if row.event_id in self.handled[one]:
            self.duplicates[one] += 1
            return
        self.handled[one].add(row.event_id)
        if self.promises.is_ordered(one, row) and self._has_order(spec, row):
            for line in row.keys:
                last = self._handled_to.get((one, *line), "")
                require(row.position > last, f"{one} (ordered): {row.event_id} handled after {last} of its key")
                self._handled_to[one, *line] = row.position

    def _has_order(self, spec: SubscriptionSpec, row: Row) -> bool:
        """A request cannot be fenced: a stale owner may still send what was passed over as expired by the next one."""
        one = who(spec)
        if row.event_id in self.expired[one] or not self._is_there(spec):
            return False
        return self.promises.has_begun(one, row) and self.promises.has_order(one, row)

    def _is_there(self, spec: SubscriptionSpec) -> bool:
        """Not after it was removed. A turn may then go by the cursors of whoever has its name now."""
        return self.current.get(spec.name) == who(spec)

    # writes

    def is_handled(self, one: str, event_id: str, replay: str) -> bool:
        return event_id in (self.replayed[one, replay] if replay else self.handled[one])

    def after_write(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], lease: str) -> None:
        epoch = kwargs["epoch"] if "epoch" in kwargs else args[_EPOCH_AT.get(method, -1)]
        require_epoch(self._leases, lease, epoch, f"delivery.{method}")
        if method == "retried" and args[1].fate is Fate.ENDPOINT_FAILED:
            require(args[0] in self.live_failed, f"{args[0]} is blamed for what only a replay met")
            self.live_failed.discard(args[0])
        self.look(method, args, kwargs)

    def look(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At everything that may have changed, by whatever was written."""
        wish = getattr(self, f"_on_{method}", None)
        if wish is not None:
            wish(*args)
        known = self._store.subscriptions()
        self.met[method] += 1
        self.met.update(found.state for found in known.values())
        self.by_generation.update({found.generation: who(found.spec) for found in known.values()})
        self.ever_disabled |= {who(found.spec) for found in known.values() if found.state is SubscriptionState.DISABLED}
        self._look_at_specs(known)
        self.standings.after(method, args, known, kwargs.get("generation"))
        for one, event_ids in self.queued.after(method, args, self.current, self.is_handled).items():
            self.expired[one] |= event_ids
        self._look_at_cursors()

    def states(self) -> dict[str, SubscriptionState]:
        return {name: found.state for name, found in self._store.subscriptions().items()}

    def _on_register(
        self, specs: list[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], _epoch: int
    ) -> None:
        for spec in specs:
            if spec.name not in self.current:
                self._begin(replace(spec, made_by=made_by), starts.get(spec.name))

    def _on_add(self, spec: SubscriptionSpec, start: CursorVector | None, _epoch: int) -> None:
        require(spec.name not in self.current, f"{spec.name!r} was made although the name is taken")
        self._begin(spec, start)

    def _on_change(self, name: str, changes: Mapping[str, Any], _epoch: int) -> None:
        self.promises.change(replace(self._ours(name, "changed"), **changes))

    def _on_rotate(self, name: str, secret: str, until: datetime | None, *_: object) -> None:
        self.keys.rotate(who(self._ours(name, "rotated")), secret, until)

    def _on_retire(self, name: str, _epoch: int) -> None:
        self.keys.retire(who(self._ours(name, "retired")))

    def _on_remove(self, name: str, _epoch: int) -> None:
        self._ours(name, "removed")
        del self.current[name]

    def _begin(self, spec: SubscriptionSpec, start: CursorVector | None) -> None:
        one = self.current[spec.name] = who(spec)
        stands = self._store.groups()[self._store.tables.shard_at[spec.name]].cursors if start is None else start
        self._passed[one] = dict(stands)
        self.promises.begin(spec, stands)
        self.keys.begin(spec)

    def _ours(self, name: str, done: str) -> SubscriptionSpec:
        require(name in self.current, f"{name!r} was {done}, and does not exist")
        spec = self.promises.asked(self.current[name])
        require(spec.made_by is MadeBy.API, f"{name!r} was {done} by the API, and is the file's")
        return spec

    def _look_at_specs(self, known: Mapping[str, Subscription]) -> None:
        names = {name: who(found.spec) for name, found in known.items()}
        require(names == self.current, f"the subscriptions are {names}; asked for were {self.current}")
        for name, found in known.items():
            there, asked = _terms(found.spec), _terms(self.promises.asked(self.current[name]))
            require(there == asked, f"{name} is {there}; asked for was {asked}")

    def _look_at_cursors(self) -> None:
        groups = self._store.groups().values()
        for name, one in self.current.items():
            mine_in = [group for group in groups if name in group.members]
            require(len(mine_in) <= 1, f"{name} is a member of {len(mine_in)} groups")
            vector = mine_in[0].cursors if mine_in else self._store.cursors(name)
            mine = self._passed[one]
            for place, now in vector.items():
                before = mine.get(place, Cursor(0))
                if now == before:
                    continue
                require(now > before, f"cursor of {one} at {place} went back from {before} to {now}")
                self.met["stands inside a batch"] += bool(now.through)
                for row in self._rows(place, before.batch, now.batch + 1):
                    passed = _has_passed(now, row) and not _has_passed(before, row)
                    if passed and self.promises.owes(one, row):
                        self._require_settled(one, name, row)
                        self.owed[one].add(row.event_id)
                mine[place] = now

    def _require_settled(self, one: str, name: str, row: Row) -> None:
        fine = row.event_id in self.handled[one] or row.event_id in self.expired[one]
        if not fine and not self.queued.has(name, row.event_id):
            raise Broken(f"cursor of {one} at {row.place} passed {row.event_id}: neither handled nor parked")

    def _rows(self, place: SourcePartition, after: int, to: int) -> Iterator[Row]:
        log = self._logs[place.source]
        for append in log.commits:
            if append.partition == place.partition and after < append.batch <= to:
                yield from log.rows_of(append)


def _has_passed(reached: Cursor, row: Row) -> bool:
    return row.batch <= reached.batch or (row.batch == reached.batch + 1 and row.position <= reached.through)


def _terms(spec: SubscriptionSpec) -> tuple[object, ...]:
    """All that can be asked for at run time, but for secrets, which receivers check."""
    return spec.url, spec.streams, spec.ops, spec.ordered, spec.bundle, spec.parked_max, spec.made_by
