"""The replication slot thrown away under the running process (P6), and the process killed while it repairs that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from evermark.testing.lost_slot import (
    forgetful_server,
    losing_scene,
    one_of_several_repaired,
    repaired,
    repaired_twice,
    repaired_while_idle,
)
from evermark.testing.servers import PostgresServer

# One on each side of the points of no return; `make chaos ARGS=--slot` walks over all of them.
# The second loss dies in between, at repair.closed.
SAMPLE = ("repair.slot_made", "repair.old_dropped")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    folder = tmp_path_factory.mktemp("forgetful")
    with forgetful_server(folder) as server:
        yield server


def test_p6_a_lost_slot_is_repaired_exactly_with_long_transactions_and_deaths_on_the_way(
    tmp_path: Path, server: PostgresServer
) -> None:
    """GIVEN five open transactions WHEN the slot is lost and repairing dies twice THEN the log equals `events`; WHEN it
    is lost again, and its successor before it is used, THEN a second try finds the rest; WHEN it is lost while the
    process is idle THEN that is repaired too, before any event comes."""
    with losing_scene(tmp_path, server) as scene:
        running = repaired(scene, server, 3_000, SAMPLE, then="repair.closed@1")
        running = repaired_twice(scene, server, 1_000, running)
        repaired_while_idle(scene, server, running)
        assert len(scene.logged()) > 5_000
        assert running.terminate() == 0


def test_p6_one_of_several_slots_is_repaired_while_the_others_go_on(tmp_path: Path, server: PostgresServer) -> None:
    """GIVEN three slots that share the events WHEN one is dropped THEN only its partition waits, and all arrives."""
    with losing_scene(tmp_path, server, slots=3) as scene:
        running = one_of_several_repaired(scene, 1_000)
        assert len(scene.logged()) > 1_000
        assert running.terminate() == 0
