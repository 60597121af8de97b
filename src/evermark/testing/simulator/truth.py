"""What must hold, looked at after every effect that landed. A violation ends the run where it happened."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.memory import MemoryCheckpoints
from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.base import CursorVector, Place, SubscriptionSpec
from evermark.delivery.memory import MemoryDelivery
from evermark.log.head import Head, MemoryHeads
from evermark.testing.simulator.source import Made, Row, SimLog


class Broken(AssertionError):
    """A promise was broken."""


def require(holds: bool, said: str) -> None:
    if not holds:
        raise Broken(said)


class Truth:
    """Knows everything that was produced and everything that any receiver did."""

    def __init__(
        self,
        logs: Mapping[str, SimLog],
        leases: MemoryLeases,
        heads: MemoryHeads,
        checkpoints: MemoryCheckpoints,
        store: MemoryDelivery,
    ) -> None:
        self._logs = logs
        self._leases = leases
        self._heads = heads
        self._checkpoints = checkpoints
        self._store = store
        self.made: dict[Place, list[Made]] = defaultdict(list)  # without repeats
        self.begun: dict[Place, int] = {}  # the epoch of the last owner that began
        self.handled: dict[str, set[str]] = defaultdict(set)
        self.refused_forever: dict[str, set[str]] = defaultdict(set)
        self.expired: dict[str, set[str]] = defaultdict(set)  # passed over because of the TTL, as far as reported
        self.parked: dict[str, set[str]] = defaultdict(set)  # ever
        self.dropped: set[tuple[str, str]] = set()
        self.starts: dict[str, CursorVector] = {}
        self.passed: dict[str, dict[Place, int]] = defaultdict(dict)
        self.duplicates: Counter[str] = Counter()
        self._first_starts: dict[str, CursorVector] = {}
        self._generations: dict[str, int] = {}
        self._remade: set[str] = set()  # a request of its former self may still come, out of any order
        self._offered: dict[str, set[str]] = defaultdict(set)
        self._offered_to: dict[tuple[str, Place, str], str] = {}
        self._handled_to: dict[tuple[str, Place, str], str] = {}
        self._durable_ids: dict[str, set[str]] = defaultdict(set)
        self._durable_seen: dict[str, int] = defaultdict(int)
        self._safe: dict[Place, int] = defaultdict(int)  # how many of `made` were seen to be durable

    def current_epoch(self, lease: str) -> int:
        held = self._leases._held.get(lease)
        return held.epoch if held else 0

    # ingest

    def after_commit(self, source: str, batch: int, partition: int, epoch: int) -> None:
        log, place = self._logs[source], Place(source, partition)
        require(epoch >= self.begun.get(place, 0), f"epoch {epoch} committed to {place} after a later owner began")
        mine = [a for a in log.commits if a.partition == partition]
        require([a.batch for a in mine] == list(range(1, len(mine) + 1)), f"{place}: batches are not dense")
        require(mine[-1].batch == batch, f"{place}: batch {batch} was not the last")
        ids = [row.event_id for append in mine for row in log.rows_of(append)]
        twice = [i for i, n in Counter(ids).items() if n > 1]
        require(not twice, f"{place}: in the log more than once: {twice[:3]}")
        expected = [made.event_id for made in self.made[place][: len(ids)]]
        require(ids == expected, f"{place}: batch {batch} does not follow in source order")

    def after_sync(self, source: str) -> None:
        log = self._logs[source]
        for append in log.commits[self._durable_seen[source] : log.durable_commits()]:
            self._durable_ids[source].update(row.event_id for row in log.rows_of(append))
        self._durable_seen[source] = log.durable_commits()

    def after_head(self, source: str, partition: int, head: Head) -> None:
        self._require_epoch(source_lease(source), head.epoch, "a log head")
        durable = self._logs[source].durable_batch(partition)
        require(head.batch <= durable, f"head of {source}/{partition} at {head.batch}; durable is {durable}")

    def after_checkpoint(self, source: str, partition: int, checkpoint: Checkpoint) -> None:
        self._require_epoch(source_lease(source), checkpoint.epoch, "a checkpoint")
        place = Place(source, partition)
        made, safe = self.made[place], self._safe[place]
        while safe < len(made) and made[safe].position < checkpoint.position:
            require(
                made[safe].event_id in self._durable_ids[source],
                f"checkpoint of {place} at {checkpoint.position}, but {made[safe].event_id} is not durable",
            )
            safe += 1
        self._safe[place] = safe

    def after_confirm(self, source: str, partition: int, end: str) -> None:
        saved = self._checkpoints.list(source).get(partition)
        require(
            saved is not None and end <= saved.position,
            f"{source}/{partition} was confirmed to {end}; the checkpoint is {saved}",
        )

    # delivery

    def before_offer(self, subscription: str, row: Row) -> None:
        """A request is about to reach a receiver."""
        head = self._heads.load(row.place.source).get(row.place.partition)
        durable = self._logs[row.place.source].durable_batch(row.place.partition)
        bound = min(durable, head.batch if head else 0)
        require(row.batch <= bound, f"{row.event_id} of batch {row.batch} delivered; the durable head is {bound}")
        start = self._first_starts.get(subscription, {}).get(row.place, 0)
        require(row.batch > start, f"{subscription} begins after batch {start} of {row.place}; got {row.event_id}")
        if row.event_id in self._offered[subscription] or self._has_no_order(subscription, row):
            return
        self._offered[subscription].add(row.event_id)
        lane = (subscription, row.place, row.key)
        last = self._offered_to.get(lane, "")
        require(row.position > last, f"{subscription}: {row.event_id} first offered after {last} of its key")
        self._offered_to[lane] = row.position

    def on_handled(self, spec: SubscriptionSpec, row: Row) -> None:
        if row.event_id in self.handled[spec.name]:
            self.duplicates[spec.name] += 1
            return
        self.handled[spec.name].add(row.event_id)
        if spec.ordered and not self._has_no_order(spec.name, row):
            lane = (spec.name, row.place, row.key)
            last = self._handled_to.get(lane, "")
            require(row.position > last, f"{spec.name} (ordered): {row.event_id} handled after {last} of its key")
            self._handled_to[lane] = row.position

    def _has_no_order(self, subscription: str, row: Row) -> bool:
        """A request cannot be fenced: a stale owner may still send what was passed over as expired by the next one."""
        return subscription in self._remade or row.event_id in self.expired[subscription]

    def after_delivery_write(self, method: str, epoch: int) -> None:
        self._require_epoch(DELIVER_LEASE, epoch, f"delivery.{method}")
        self.look_at_cursors()

    def look_at_cursors(self) -> None:
        known, group = self._store.subscriptions(), self._store.group()
        parked: dict[str, set[str]] | None = None
        for name, subscription in known.items():
            vector = group.cursors if name in group.members else self._store.cursors(name)
            if self._generations.get(name) != subscription.generation:
                if name in self._generations:
                    self._remade.add(name)
                self._generations[name] = subscription.generation
                self.starts[name] = dict(vector)
                self._first_starts.setdefault(name, dict(vector))
                self.passed[name] = dict(vector)
            mine = self.passed[name]
            for place, batch in vector.items():
                before = mine.get(place, 0)
                if batch == before:
                    continue
                require(batch > before, f"cursor of {name} at {place} went back from {before} to {batch}")
                parked = self._parked_ids() if parked is None else parked
                for row in self.matched(subscription.spec, place, before, batch):
                    fine = row.event_id in self.handled[name] or row.event_id in parked[name]
                    fine = fine or row.event_id in self.expired[name]
                    require(fine, f"cursor of {name} at {place} passed {row.event_id}: neither handled nor parked")
                mine[place] = batch

    def after_removal(self, rows: Mapping[int, tuple[str, str]]) -> None:
        """Parked rows are gone: each of them was handled."""
        for subscription, event_id in rows.values():
            done = event_id in self.handled[subscription]
            require(done, f"{subscription}: {event_id} was taken out of the queue, unhandled")

    def before_drop(self, rows: Iterable[tuple[str, str]]) -> None:
        """A person gives these up: only what was refused for ever may have come to that."""
        for subscription, event_id in rows:
            forever = event_id in self.refused_forever[subscription]
            require(forever, f"{subscription}: {event_id} is dead, but was not refused for ever")
            self.dropped.add((subscription, event_id))

    def matched(self, spec: SubscriptionSpec, place: Place, after: int, to: int) -> list[Row]:
        log = self._logs[place.source]
        return [
            row
            for append in log.commits
            if append.partition == place.partition and after < append.batch <= to
            for row in log.rows_of(append)
            if wants(spec, row)
        ]

    def _parked_ids(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for row in self._store._rows.values():
            found[row.subscription].add(row.event.event_id)
            self.parked[row.subscription].add(row.event.event_id)
        return found

    def _require_epoch(self, lease: str, epoch: int, what: str) -> None:
        current = self.current_epoch(lease)
        require(epoch == current, f"{what} written with epoch {epoch} of {lease}; the current one is {current}")


def wants(spec: SubscriptionSpec, row: Row) -> bool:
    return not spec.streams or row.stream in spec.streams
