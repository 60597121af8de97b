"""Rows of this node's store compared with a peer's, by digests of key ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from evermark.errors import EvermarkError
from evermark.replicas.base import ReplicaStore
from evermark.replicas.digests import Difference, Digest, RowDigest, Span, differing, digest_of
from evermark.replicas.exchange import Peer
from evermark.replicas.local_node import LocalNode

_LEAF_SPANS_ROWS_MAX = 100_000


def differences(node: LocalNode, peer: Peer, table: str, limit: int = 1000) -> tuple[list[Difference], bool]:
    """The rows that differ, and whether these are all."""
    node.table(table)
    return differing(StoredRows(node.store, table), _PeersRows(peer, table), limit)


@dataclass(frozen=True)
class StoredRows:
    store: ReplicaStore
    table: str

    def digests(self, spans: Sequence[Span]) -> list[Digest]:
        return [digest_of(rows) for rows in self.store.row_digests(self.table, spans)]

    def rows(self, spans: Sequence[Span]) -> list[list[RowDigest]]:
        found: list[list[RowDigest]] = []
        total = 0
        for rows in self.store.row_digests(self.table, spans):
            found.append(list(_at_most(rows, _LEAF_SPANS_ROWS_MAX - total)))
            total += len(found[-1])
        return found

    def cuts(self, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return [self.store.cuts(self.table, span, pieces) for span in spans]


@dataclass(frozen=True)
class _PeersRows:
    peer: Peer
    table: str

    def digests(self, spans: Sequence[Span]) -> list[Digest]:
        return self.peer.digests(self.table, spans)

    def rows(self, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return self.peer.rows(self.table, spans)

    def cuts(self, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return self.peer.cuts(self.table, spans, pieces)


def _at_most(rows: Iterable[RowDigest], limit: int) -> Iterable[RowDigest]:
    for at, row in enumerate(rows):
        if at >= limit:
            raise EvermarkError("too many rows are asked for at once", hint="ask for smaller ranges")
        yield row
