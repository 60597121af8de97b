"""A table taken from a peer by a snapshot."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from evermark.errors import SetupError
from evermark.replicas import clock
from evermark.replicas.base import Cut
from evermark.replicas.exchange import Manifest, Peer
from evermark.replicas.local_node import LocalNode
from evermark.replicas.native import NotNative
from evermark.replicas.snapshots import Snapshots, verified


class Bootstrap:
    def __init__(self, node: LocalNode, snapshots: Snapshots) -> None:
        self._node, self._store, self._snapshots = node, node.store, snapshots

    def take(self, peer: Peer, table: str) -> None:
        """Take a snapshot of a peer, chunk by chunk, then merge it at once. Chunks of an earlier try are kept."""
        native = self._store.native_form(table) if self._store.is_empty(table) else None
        try:
            self._take(peer, table, native)
        except NotNative:
            self._take(peer, table, None)

    def _take(self, peer: Peer, table: str, native: str | None) -> None:
        spec = self._store.tables()[table]
        manifest, kept = verified(peer.snapshot(table, native), spec), self._snapshots
        self._check_clock(peer, manifest)
        self._take_chunks(peer, manifest, kept.missing(peer.name, manifest))
        cut = Cut(manifest.held, manifest.clock)

        def merge() -> int:
            if manifest.files:
                files = kept.taken_files(peer.name, manifest)
                return self._store.take_dump(table, cut, files, self._node.now_ms())
            return self._store.merge(table, cut, lambda: kept.taken(peer.name, manifest, spec), self._node.now_ms())

        self._node.patiently(merge)
        kept.done_with(peer.name, manifest)

    def _check_clock(self, peer: Peer, manifest: Manifest) -> None:
        """Its rows would beat every honest change until then, and this node's own clock would be as wrong from now on:
        as with an event, but there is no part of a snapshot that could be left out."""
        now_ms = self._node.now_ms()
        if clock.is_ahead(manifest.clock, now_ms, self._node.limits.skew_ms):
            ahead_s = (clock.ms_of(manifest.clock) - now_ms) / 1000
            raise SetupError(
                f"{manifest.table}: the clock of {peer.name}'s snapshot is {ahead_s:.0f} s ahead of ours",
                hint="compare the clocks of the two machines. If ours is right, some versions there are of the future: "
                "take the table from another member, or make that node anew (docs/replicas.md)",
            )

    def _take_chunks(self, peer: Peer, manifest: Manifest, missing: Sequence[int]) -> None:
        """The next one is on its way while one is checked and written."""
        with ThreadPoolExecutor(1) as threads:
            coming = [threads.submit(peer.chunk, manifest.id, number) for number in missing[:1]]
            for number, following in itertools.zip_longest(missing, missing[1:]):
                data = coming.pop().result()
                if following is not None:
                    coming.append(threads.submit(peer.chunk, manifest.id, following))
                self._snapshots.take(peer.name, manifest, number, data)
