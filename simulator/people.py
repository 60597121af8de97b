"""People and programs at the desk: they make, change and remove subscriptions, and see to what needs somebody.

What they ask for lands under the epoch of whoever delivers (`evermark.cluster.holding.as_holder`): an instance sees it
at its next look, whatever it is in the middle of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.holding import as_holder
from evermark.delivery.decide.registration import start_vector
from evermark.delivery.model import CursorVector, MadeBy, ParkedRow, Subscription, SubscriptionState
from evermark.delivery.replay.plan import AskedBy, Request
from evermark.delivery.replay.timeslice import moment_at
from evermark.errors import ConflictError, EvermarkError, NotFoundError
from simulator.instance import Instance, SimLogView
from simulator.promises import who
from simulator.scenario import STREAMS, asked_spec, session_of, wanted

_NAMES = ("api", "tool")
_LOOK_EVERY_S = 2.0
_OVERLAP_S_MAX = 30.0
_IMPATIENT = 5  # times as likely while work is done for it

Step = Callable[[int], object]


def window(rng: random.Random, now: float) -> tuple[datetime, datetime]:
    """Of the time until now, or a little more."""
    ends = sorted(round(1e6 * now * rng.random() * rng.choice((1, 1, 1.2))) for _ in range(2))
    return moment_at(0 if rng.random() < 0.3 else ends[0]), moment_at(ends[1])


class Desk:
    """One at each instance, whether it delivers or not."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._world = instance.world
        self._rng = instance.world.rng
        self._store = instance.store
        self._view = SimLogView(instance)
        self._holder = replace(instance.holder, instance=f"{instance.holder.instance}/api")

    def run(self) -> None:
        while True:
            try:
                self._look()
            except (ConflictError, NotFoundError):
                self._world.count("asked in vain")
            except EvermarkError:
                self._world.count("desk did not answer")
            self._instance.runtime.wait(_LOOK_EVERY_S)

    def _look(self) -> bool:
        known: dict[str, Subscription] = self._store.subscriptions()
        if self._see_to_keys() or self._see_to_parked(known) or self._see_to_stopped(known):
            return True
        if self._world.scenario.replays and not self._world.calm and self._replay(known):
            return True
        return not self._world.calm and (self._wish(known) or self._pause(known))

    def _as_deliverer(self, step: Step) -> None:
        world = self._world
        as_holder(self._instance.leases, DELIVER_LEASE, self._holder, lambda: world.owner_epoch(DELIVER_LEASE), step)

    # replays

    def _replay(self, known: Mapping[str, Subscription]) -> bool:
        """Any window once more, or the very one that was asked for last; some change their mind."""
        rng, replays = self._rng, self._instance.replays
        drawn = rng.random()
        if drawn < 0.1:
            last = replays.newest(1)
            again = last[0].request if last and rng.random() < 0.3 else None
            request = replace(again, asked_by=AskedBy.CLI, control=None) if again else self._request(known)
            self._as_deliverer(lambda epoch: replays.request(request, epoch))
        elif drawn < 0.12:
            some = replays.open()
            if some:
                self._as_deliverer(lambda epoch: replays.cancel(rng.choice(some).id, epoch))
        return drawn < 0.12

    def _request(self, known: Mapping[str, Subscription]) -> Request:
        rng = self._rng
        since, until = window(rng, self._world.baton.now)
        return Request(
            AskedBy.API,
            rng.choice([*self._world.sources, *self._world.sources, "nowhere"]) if rng.random() < 0.2 else "shop",
            since,
            until,
            streams=rng.choice(((), (), STREAMS[:1], STREAMS[1:])),
            where=f"key = 'k{rng.randrange(4)}'" if rng.random() < 0.3 else None,
            subscription=rng.choice([*known, "nobody"]) if rng.random() < 0.5 else None,
            rate_per_s=rng.choice((0.0, 0.0, 2.0)),
        )

    # what needs somebody

    def _see_to_keys(self) -> bool:
        """Keys are published late, mostly, and now and then before anybody needs them."""
        rng, calm = self._rng, self._world.calm
        if not self._world.scenario.has_bot:
            return False
        missing = sorted({row.event.session for row in self._store.parked.rows(limit=100) if row.waits})
        if missing and (calm or rng.random() < 0.4):
            some = missing if calm else rng.sample(missing, rng.randint(1, len(missing)))
        elif not calm and rng.random() < 0.05:
            some = [session_of(0, rng.choice(STREAMS), "k0")]
        else:
            return False
        keys, now = dict.fromkeys(some, "sealed"), self._world.clock()
        self._as_deliverer(lambda epoch: self._store.bots.publish("phone", keys, now, epoch))
        return True

    def _see_to_parked(self, known: Mapping[str, Subscription]) -> bool:
        """Dead ones are tried again or given up; once in a while one is that is not dead."""
        rng, calm = self._rng, self._world.calm
        rows: list[ParkedRow] = self._store.parked.rows(limit=100)
        hopeless = [row for row in rows if self._is_hopeless(row, known)]
        if not rows or not ((calm and hopeless) or rng.random() < 0.2):
            return False
        ids = [row.id for row in (hopeless or rng.sample(rows, 1))]
        if not hopeless or rng.random() < 0.5:
            first = known.get(rows[0].subscription)  # it may have been made since we looked
            if rng.random() < 0.5 and first is not None:
                self._world.receiver_of(first.spec).mend()
            self._as_deliverer(lambda epoch: self._store.parked.release(ids, self._world.clock(), epoch))
        else:
            self._as_deliverer(lambda epoch: self._store.parked.drop(ids, epoch))
        return True

    def _is_hopeless(self, row: ParkedRow, known: Mapping[str, Subscription]) -> bool:
        """Dead; or, in the calm, in the way of a subscription that has too much parked and will never be taken."""
        found = known.get(row.subscription)
        if row.is_dead or found is None or not self._world.calm:
            return row.is_dead
        refused = self._world.account.queued.refused_forever[who(found.spec)]
        return row.event.event_id in refused and found.state is SubscriptionState.SUSPENDED

    def _see_to_stopped(self, known: Mapping[str, Subscription]) -> bool:
        for name, found in known.items():
            if self._is_stopped(found) and (self._world.calm or self._rng.random() < 0.5):
                self._world.receiver_of(found.spec).gone = False
                self._resume(name)
                return True
        return False

    def _is_stopped(self, found: Subscription) -> bool:
        """Disabled or paused; or suspended with nothing left to probe it with, until something new comes."""
        if found.state is not SubscriptionState.SUSPENDED or found.next_attempt_at is None:
            return found.state in (SubscriptionState.SUSPENDED, SubscriptionState.DISABLED)
        store = self._world.store
        return self._world.calm and found.failures > 0 and store.cursors(found.name) == store.group_of(found.name)

    def _resume(self, name: str) -> None:
        self._as_deliverer(lambda epoch: self._store.resume(name, epoch))

    def _pause(self, known: Mapping[str, Subscription]) -> bool:
        rng = self._rng
        if known and rng.random() < 0.1:
            name = rng.choice(sorted(known))
            self._as_deliverer(lambda epoch: self._store.suspend(name, "a person", epoch))
        elif self._world.scenario.ttl_s and rng.random() < 0.5:
            name, ttl_s = next(iter(self._world.scenario.ttl_s.items()))
            now = self._world.clock()
            self._as_deliverer(
                lambda epoch: self._store.parked.expire(name, now - timedelta(seconds=ttl_s), now, epoch)
            )
        return False

    # what somebody wishes

    def _wish(self, known: Mapping[str, Subscription]) -> bool:
        chance, rng = self._world.scenario.wish_chance, self._rng
        if not chance:
            return False
        ours = sorted(name for name, found in known.items() if found.spec.made_by is MadeBy.API)
        free = [name for name in self._names() if name not in known]
        if free and rng.random() < chance["add"]:
            self._add(rng.choice(free), None)
            return True
        for name in ours:
            busy = _IMPATIENT if name in self._instance.serving() else 1
            for what in ("anew", "remove", "change", "rotate", "retire"):
                if rng.random() < chance[what] * busy:
                    getattr(self, f"_{what}")(name)
                    return True
        if known and rng.random() < chance["trespass"]:
            self._trespass(rng.choice(sorted(known)), known)
        return False

    def _names(self) -> tuple[str, ...]:
        """Now and then somebody takes a name that the file is going to use."""
        late = self._world.scenario.late_spec
        return (*_NAMES, late.name) if late is not None and self._rng.random() < 0.05 else _NAMES

    def _add(self, name: str, start: CursorVector | None) -> None:
        spec = self._world.new_spec(asked_spec(self._rng, name, self._world.scenario.rows_max))
        if start is None:
            start = start_vector(spec.start, self._view.heads(), lambda _place, _since: 0)
        self._as_deliverer(lambda epoch: self._store.add(spec, start, epoch))

    def _anew(self, name: str) -> None:
        """From now on, or from where the former one stood."""
        stood: CursorVector = self._store.cursors(name)
        self._remove(name)
        self._add(name, stood if stood and self._rng.random() < 0.7 else None)

    def _remove(self, name: str) -> None:
        self._as_deliverer(lambda epoch: self._store.remove(name, epoch))

    def _change(self, name: str) -> None:
        changes: dict[str, Any] = wanted(self._rng, self._world.scenario.rows_max, self._rng.randint(1, 3))
        if self._rng.random() < 0.1:
            changes["url"] = f"https://{name}.example/{self._world.number()}"
            self._world.receiver_of(self._store.subscription(name).spec).gone = False
        self._as_deliverer(lambda epoch: self._store.change(name, changes, epoch))

    def _rotate(self, name: str) -> None:
        secret, now = self._world.new_secret(), self._world.clock()
        until = now + timedelta(seconds=self._rng.random() * _OVERLAP_S_MAX) if self._rng.random() < 0.7 else None
        self._as_deliverer(lambda epoch: self._store.rotate(name, secret, until, now, epoch))

    def _retire(self, name: str) -> None:
        self._as_deliverer(lambda epoch: self._store.retire(name, epoch))

    def _trespass(self, name: str, known: Mapping[str, Subscription]) -> None:
        """What is the file's stays the file's, and a name that is taken stays taken: `account` sees what lands."""
        if self._rng.random() < 0.5:
            self._add(name, None)
        elif known[name].spec.made_by is MadeBy.FILE:
            self._rng.choice((self._change, self._remove, self._rotate))(name)
