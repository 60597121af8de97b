"""Bots through the real process: killed while events wait for a session key, on streams that follow the bot."""

from __future__ import annotations

import json
from pathlib import Path

from evermark.sources.blocks.chain import EventKind
from evermark.testing.blocknodes import control, message
from evermark.testing.chat import ChatScene
from evermark.testing.until import until

ASKED = "session-key-"


class BotScene(ChatScene):
    """One bot with a device; only streams it is in are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, {"helper": None}, helper="source: chat, user: bot, device: phone")

    def settings(self) -> str:
        return f'{{type: blocks, nodes: ["{self.leader.url}"], streams_of: bots}}'

    def prepare(self) -> None:
        self.config.write_text(self.config.read_text().replace("subscriptions:", "bots:"))

    def got(self) -> list[str]:
        """What the bot handled, without what it was asked for."""
        return [ident for ident in self.handled["helper"] if not ident.startswith(ASKED)]

    def was_asked(self) -> bool:
        return any(ident.startswith(ASKED) for ident in self.handled["helper"])

    def waiting(self) -> int:
        return int(json.loads(self.run("bot", "show", "helper", "--json").stdout)["waiting"])


def test_d3_d15_a_redeployed_bot_misses_nothing_and_gets_nothing_before_its_key(tmp_path: Path) -> None:
    """GIVEN messages that need a key WHEN the process is killed while it learns who is where, and again in the middle
    of the flush THEN the bot has all of it, once, those of the session in order; it was asked for the key, and no other
    stream was read.
    """
    with BotScene(tmp_path) as scene:
        client = scene.leader.client()
        for stream in ("room", "elsewhere"):
            client.create(stream)
        client.create("direct", kind="direct", members=["alice", "bot"])
        secret = {"session": "s1"}
        joined = control("room", EventKind.JOIN, member="bot")
        client.add("room", message("room"), joined, message("room"), message("room", tags=secret))
        client.say("direct", 1)
        client.say("elsewhere", 1)
        learning = scene.up(failpoint="bots.learned")
        until(learning.died, "it was killed while it learned")
        assert not scene.got()

        # WHEN it goes on while nobody reads, and the key comes after the next start, which is killed with it
        client.add("room", message("room", tags=secret), message("room"))
        flushing = scene.up(failpoint="queue.posted")
        until(lambda: len(scene.got()) >= 4 and scene.was_asked(), "all but two came, their key asked for")
        until(lambda: scene.waiting() == 2, "both wait")
        keys = tmp_path / "keys.json"
        keys.write_text(json.dumps({"s1": "the key"}))
        scene.run("bot", "keys", "helper", "--publish", str(keys))
        until(flushing.died, "it was killed after it had sent what waited")
        client.add("room", message("room", tags=secret))
        scene.up()

        # THEN all of it came, from the join on, and those of the session in their order
        before, *room = client.hashes("room")
        wanted = [*room, *client.hashes("direct")]
        until(lambda: set(scene.got()) >= set(wanted), "the bot has everything")
        until(lambda: scene.waiting() == 0, "and nothing is left in the queue")
        assert sorted(scene.got()) == sorted(wanted) and before not in scene.got()
        assert max(scene.handled["helper"].values()) == 1
        of_session = [room[2], room[3], room[5]]
        assert [ident for ident in scene.got() if ident in of_session] == of_session
        assert set(scene.logged()).isdisjoint(client.hashes("elsewhere"))
        client.close()
