"""A node as its folder describes it: its store, its peers, and the process that serves and syncs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from evermark.error_policy import backoff_s
from evermark.errors import ConfigError, EvermarkError, Kind, NotFoundError
from evermark.observe.logging import get_logger
from evermark.replicas.auth import Gate, Party
from evermark.replicas.base import ReplicaStore
from evermark.replicas.client import HttpPeer
from evermark.replicas.identity import claim
from evermark.replicas.local_node import LocalNode
from evermark.replicas.meetings import Synced
from evermark.replicas.ranges import gaps
from evermark.replicas.replica import Replica
from evermark.replicas.server import ReplicaServer
from evermark.replicas.settings import ReplicaFolder, ReplicaSettings, is_dsn
from evermark.replicas.snapshots import Snapshots

_UPKEEP_S = 30.0
_LOOK_S = 0.2
_BACKOFF_MAX_S = 30.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def open_store(settings: ReplicaSettings) -> ReplicaStore:
    address = settings.address()
    if is_dsn(address):
        from evermark.replicas.postgres import PostgresStore

        return PostgresStore(address, settings.service, settings.schema)
    from evermark.replicas.sqlite import SqliteStore

    return SqliteStore(Path(address), settings.service)


class ReplicaNode:
    """Opens the store that the folder names, and makes sure that it is the one this node left."""

    def __init__(self, folder: ReplicaFolder) -> None:
        self.folder, self.settings = folder, folder.load()
        self._log = get_logger(part="replica", node=self.settings.name)

    def open(self) -> Replica:
        """A node on a store of its own, for one thread."""
        node = LocalNode(
            self.settings.name,
            open_store(self.settings),
            now_ms,
            self.settings.limits(),
            renewed=self._renewed,
            note=self.claim,
        )
        return Replica(node, Snapshots(self.folder.snapshots))

    def reopened(self) -> Replica:
        """As `open`, after a look whether the database is still the one that this node left: it may have been put back
        from a backup while nobody had it open."""
        replica = self.open()
        try:
            self.claim(replica.node)
        except BaseException:
            replica.store.close()
            raise
        return replica

    def claimed(self) -> Replica:
        """The first thing a process does: a restored or cloned database goes on under a new origin."""
        replica = self.reopened()
        for name in self.settings.peers:
            replica.upkeep.add_member(name)
        return replica

    def claim(self, node: LocalNode, *, anew: bool = False) -> None:
        with self.folder.claiming():
            kept = self.folder.tokens()
            before = node.origin()
            is_other = claim(node.store, kept, self.folder.keep, node.fresh_origin, anew=anew)
        if is_other and before:
            self._log.warning(
                "this database is a backup or a copy: the node goes on under a new origin",
                before=before,
                origin=node.origin(),
            )

    def _renewed(self, origin: str) -> None:
        self._log.warning("the node goes on under a new origin", origin=origin)
        self.folder.keep(replace(self.folder.tokens(), origin=origin))

    def peer(self, name: str, replica: Replica) -> HttpPeer:
        found = self.settings.peers.get(name)
        if found is None:
            raise NotFoundError(f"{name[:60]!r} is no peer of this node", hint="see `evermark replica list`")
        if found.url is None:
            raise ConfigError(f"{name} has no url: it dials us", hint=f"evermark replica add {name} --url URL")
        party = Party(self.settings.cluster, self.settings.name, name, found.key)
        return HttpPeer(found.url, party, replica.store.tables, now_ms)

    def dialled(self) -> list[str]:
        return [name for name, peer in self.settings.peers.items() if peer.url is not None]


class ReplicaMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"evermark_replica_{name}", text, ["peer"], registry=self.registry)
            for name, text in {
                "taken": "Events taken from a peer",
                "applied": "Rows changed by events of a peer",
                "duplicates": "Events that were held already",
                "pushed": "Events given to a peer",
                "quarantined": "Events left out because of their clock",
                "snapshots": "Snapshots taken from a peer",
            }.items()
        }
        self.failures = Counter(
            "evermark_replica_failures", "Meetings that failed", ["peer", "kind"], registry=self.registry
        )
        self.collected = Counter(
            "evermark_replica_collected", "Rows deleted by collection", ["table", "what"], registry=self.registry
        )
        self.rows = Gauge(
            "evermark_replica_table_rows",
            "Rows of a table, by what they are",
            ["table", "what"],
            registry=self.registry,
        )
        self.missing = Gauge(
            "evermark_replica_missing",
            "Numbers below the highest that are neither here nor given up",
            ["table"],
            registry=self.registry,
        )
        self.heard = Gauge(
            "evermark_replica_silent_seconds", "Since a member was last heard of", ["member"], registry=self.registry
        )

    def add(self, done: Synced) -> None:
        for name, counter in self._counters.items():
            counter.labels(done.peer).inc(getattr(done, name))


class ReplicaService:
    """Serves peers, pushes to them what changes, meets them every so often, and collects."""

    def __init__(self, node: ReplicaNode, host: str, port: int, every_s: float) -> None:
        self.node, self.metrics, self._every_s = node, ReplicaMetrics(), every_s
        settings: ReplicaSettings = node.settings
        keys = {name: peer.key for name, peer in settings.peers.items()}
        gate = Gate(settings.cluster, settings.name, keys)
        self.server = ReplicaServer(host, port, gate, node.reopened, self.metrics.registry)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._log = get_logger(part="replica", node=settings.name)
        self._not_renewed: dict[str, str] = {}

    def start(self) -> None:
        replica = self.node.claimed()
        self._renew_capture(replica)
        replica.store.close()
        self.server.start()
        for name in self.node.dialled():
            self._begin(lambda name=name: self._meet(name), f"peer-{name}")  # type: ignore[misc]
        self._begin(self._keep_up, "upkeep")

    def stop(self) -> None:
        self._stopping.set()
        self.server.stop()
        for thread in self._threads:
            thread.join(timeout=10)

    def _begin(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _meet(self, name: str) -> None:
        """Push at once what changes; meet whole every `every_s`, and after a failure when its backoff is over."""
        failures, head, due = 0, -1, 0.0
        replica: Replica | None = None
        lacking: dict[str, str] = {}
        while not self._stopping.is_set():
            try:
                replica = replica or self.node.reopened()
                peer = self.node.peer(name, replica)
                while not self._stopping.is_set():
                    now = replica.store.head()  # before the meeting: what is written while it ends is pushed next
                    if time.monotonic() >= due:
                        done = replica.meetings.sync(peer)
                        self.metrics.add(done)
                        if lacking != (lacking := done.skipped | done.unsent) and lacking:
                            self._log.warning("tables were not synced whole", peer=name, tables=lacking)
                        due = time.monotonic() + self._every_s * random.uniform(0.8, 1.2)
                    elif now != head:
                        self.metrics.add(replica.meetings.push(peer))
                    head, failures = now, 0
                    self._stopping.wait(_LOOK_S)
            except Exception as error:  # noqa: BLE001 - whatever it was, the next meeting may go well
                kind = error.kind if isinstance(error, EvermarkError) else Kind.UNKNOWN
                self.metrics.failures.labels(name, str(kind)).inc()
                (self._log.warning if failures else self._log.info)("a meeting failed", peer=name, error=error)
                failures += 1
                if replica is not None:
                    replica.store.close()
                replica, due = None, 0.0
                self._stopping.wait(random.uniform(0.5, 1.0) * backoff_s(failures, base_s=0.1, max_s=_BACKOFF_MAX_S))

    def _renew_capture(self, replica: Replica) -> None:
        """Old triggers capture, too: where triggers cannot be renewed now it is tried again, and said once."""
        for table in replica.store.tables():
            try:
                if replica.store.renew_capture(table):
                    self._log.info("triggers of another version of evermark were renewed", table=table)
                self._not_renewed.pop(table, None)
            except EvermarkError as error:
                if self._not_renewed.get(table) != error.message:
                    self._log.warning("triggers of another version of evermark stay for now", table=table, error=error)
                self._not_renewed[table] = error.message

    def _keep_up(self) -> None:
        while True:
            try:
                replica = self.node.reopened()
                self._renew_capture(replica)
                for table, done in replica.upkeep.collect().items():
                    self.metrics.collected.labels(table, "events").inc(done.events)
                    self.metrics.collected.labels(table, "tombstones").inc(done.tombstones)
                    counts = replica.store.counts(table)
                    for what in ("rows", "events", "tombstones"):
                        self.metrics.rows.labels(table, what).set(getattr(counts, what))
                    missing = gaps(replica.store.held(table), replica.store.lost(table))
                    self.metrics.missing.labels(table).set(sum(ranges.count for ranges in missing.values()))
                for name, member in replica.store.members().items():
                    self.metrics.heard.labels(name).set((now_ms() - member.heard_ms) / 1000 if member.said else -1)
                replica.store.close()
            except Exception as error:  # noqa: BLE001 - the next turn may go well
                self._log.warning("upkeep failed", error=error)
            if self._stopping.wait(_UPKEEP_S):
                return
