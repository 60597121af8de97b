"""The log as clients of the live tail that are behind read it: it has to reach what State knows of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.app.tailing import DeploymentTail
from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.model import BEGINNING, Cursor, SourcePartition
from evermark.errors import FormatError
from evermark.log.append import DeltaLog
from evermark.log.head import PostgresHeads
from evermark.log.table import commit_file
from evermark.state.connection import State
from evermark.testing.contracts.heads import head
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from tests.contract.log.log_scene import fill

SHOP = SourcePartition("shop", 0)
OTHER = SourcePartition("shop", 1)


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


def tail_of(folder: Path, state: State) -> DeploymentTail:
    deployment: Any = SimpleNamespace(log_folder=lambda _: folder)
    return DeploymentTail(deployment, state)


def note_heads(state: State, last: dict[int, int]) -> None:
    epoch = owners(PostgresLeases(state, is_gone=lambda holder: True))(source_lease("shop"))
    for partition, batches in last.items():
        for batch in range(1, batches + 1):
            PostgresHeads(state).move("shop", partition, head(batch, epoch))


def read_all(tail: DeploymentTail, place: SourcePartition, cursor: Cursor = BEGINNING) -> list[str]:
    piece = tail.piece(place, cursor, tail.heads()[place], 1_000, 1_000_000)
    return piece.rows.column("event_id").to_pylist()


@pytest.mark.parametrize("is_open", [True, False], ids=["under a reader", "at a start"])
def test_a_client_does_not_pass_over_batches_whose_commits_are_gone(
    tmp_path: Path, state: State, *, is_open: bool
) -> None:
    """GIVEN two partitions WHEN the newest commit of one is gone THEN a client that is behind is told so, and goes on
    in the other; WHEN it is back the client gets what was in it."""
    log, tail = DeltaLog(tmp_path / "shop"), tail_of(tmp_path / "shop", state)
    fill(log, 2, partition=1)
    fill(log, 3)
    note_heads(state, {0: 3, 1: 2})
    if is_open:
        assert read_all(tail, SHOP) == ["0-1-0", "0-2-0", "0-3-0"]
    newest = commit_file(tmp_path / "shop", 5)
    newest.rename(tmp_path / "aside")
    for behind in (BEGINNING, Cursor(2)):
        with pytest.raises(FormatError, match="the log of shop/0 ends at batch 2, but batch 3 was taken"):
            read_all(tail, SHOP, behind)
    assert read_all(tail, OTHER) == ["1-1-0", "1-2-0"]
    (tmp_path / "aside").rename(newest)
    assert read_all(tail, SHOP, Cursor(2)) == ["0-3-0"]


def test_a_partition_without_a_commit_is_lost_and_was_not_removed_by_retention(tmp_path: Path, state: State) -> None:
    """GIVEN a partition that State has a head of WHEN no commit of it is left THEN its first batch is not "none any
    more", which a client would be told as events that retention removed."""
    log, tail = DeltaLog(tmp_path / "shop"), tail_of(tmp_path / "shop", state)
    fill(log, 1, partition=1)
    note_heads(state, {0: 3, 1: 1})
    assert tail.heads() == {SHOP: 3, OTHER: 1}
    assert tail.first_batch(OTHER) == 1
    with pytest.raises(FormatError, match="the log of shop/0 ends at batch 0, but batch 3 was taken"):
        tail.first_batch(SHOP)
