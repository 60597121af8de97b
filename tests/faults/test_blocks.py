"""Block streams through the real process: killed in the middle of a gap, while nodes go on, and one of them dies."""

from __future__ import annotations

import json
from pathlib import Path

from evermark.testing.chat import ChatScene
from evermark.testing.commands import REAL
from evermark.testing.pipeline import died_by_itself
from evermark.testing.until import until


def test_a_redeployed_reader_misses_no_message_though_it_and_a_node_are_killed(tmp_path: Path) -> None:
    """GIVEN a chat WHEN the reader dies in a gap, blocks go on and a node dies THEN log and webhook are whole."""
    with ChatScene(tmp_path, {"one": None}) as scene:
        scene.say("room", 20)
        scene.say("other", 5)
        first = scene.up(commands=REAL)
        scene.wait_delivered(24)
        first.kill()

        # WHEN hundreds of blocks and several snapshots are made, and the next process dies while it fetches them
        scene.say("room", 600)
        scene.say("new", 3)
        died_by_itself(scene.up("file.written"))

        # WHEN more is made while nobody reads, and the node that took it is killed
        scene.say("room", 120)
        scene.say("other", 70)
        scene.level()
        scene.leader.kill()
        last = scene.up()

        # THEN the log has every event once, and so has the receiver's handler
        scene.check_complete()
        assert len(scene.logged()) == 818

        # THEN what people look at says so: a dead node is a warning, and nothing is stale
        ran = scene.run("doctor", "--json", check=False)
        found = {(row["check"], row["grade"]) for row in json.loads(ran.stdout)["findings"]}
        assert {("node", "warning"), ("node", "ok"), ("streams", "ok"), ("resume", "ok")} <= found
        assert ran.returncode == 0, ran.stdout
        until(lambda: last.terminate() == 0, "it ends in order")
