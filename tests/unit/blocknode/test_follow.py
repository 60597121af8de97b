"""A follower's rounds over a node that is told what to answer: what it copies, what it owes, what holds it up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from evermark.blocknode import follow as follow_module
from evermark.blocknode.database import Database
from evermark.blocknode.follow import Follower, answer_of
from evermark.blocknode.ledger import Clocks, Ledger
from evermark.blocknode.reader import Reader
from evermark.blocknode.settings import NodeSettings
from evermark.blocknode.writer import Writer
from evermark.errors import BusyError, EvermarkError, FormatError, NotFoundError, UnreachableError
from evermark.sources.blocks.chain import START, Block, Snapshot, StreamKind, make_block

FIRST = Snapshot(StreamKind.CHANNEL, "a", "i", (), {})


def chain(stream: str, count: int) -> list[Block]:
    blocks = [make_block(stream, START, 0, [], FIRST)]
    while len(blocks) < count:
        blocks.append(make_block(stream, blocks[-1].cookie, 0, [], None))
    return blocks


class Leader:
    """A node with streams of empty blocks. `said` is what it answers about a stream instead, right or wrong."""

    def __init__(self) -> None:
        self.streams: dict[str, tuple[int, list[Block]]] = {}
        self.said: dict[str, Callable[[], Any]] = {}
        self.listed: Callable[[], Any] | None = None
        self.asked: list[str] = []

    def grow(self, stream: str, blocks: int = 1) -> None:
        """The stream has so many blocks now, and comes last in the listing."""
        last = max((touched for touched, _ in self.streams.values()), default=0)
        self.streams[stream] = (last + 10, chain(stream, blocks))

    def answer(self, path: str, query: Mapping[str, Any]) -> Any:
        self.asked.append(path)
        if path == "/v1/streams":
            return self.listing(query["touched_after"]) if self.listed is None else self.listed()
        stream = path.split("/")[3]
        if stream in self.said:
            return self.said[stream]()
        if stream not in self.streams:
            raise NotFoundError("no such stream")
        _, blocks = self.streams[stream]
        after = query.get("minipool_gen", 0)
        said = {"reset": after == 0, "blocks": [block.wire() for block in blocks[after:]], "minipool": []}
        return said | {"cookie": blocks[-1].cookie.wire(), "more": False}

    def listing(self, after: int) -> dict[str, Any]:
        found = sorted((touched, stream) for stream, (touched, _) in self.streams.items() if touched > after)
        rows = [{"stream": stream, "touched": touched, "deleted": False} for touched, stream in found]
        return {"node": "n", "streams": rows, "touched": found[-1][0] if found else after}


class Told(Follower):
    leader: Leader

    async def _ask(self, path: str, query: Mapping[str, Any]) -> Any:
        return self.leader.answer(path, query)

    async def has(self) -> dict[str, int]:
        """The streams that it lists, with how many blocks each has."""
        rows = await self._reader.run(lambda db: self._reader.listing(db, 0, 1000))
        return {row["stream"]: row["minipool_gen"] for row in rows}

    async def owes(self) -> list[str]:
        return await self._reader.run(lambda db: self._reader.owed(db, "", 1000))


def following(tmp_path: Path, scene: Callable[[Told, Leader], Awaitable[None]]) -> None:
    """Run a scene with a follower that has learned the node's id, and nothing else."""

    async def run() -> None:
        settings = NodeSettings(tmp_path / "copy", follow="http://told")
        database = Database(settings.data)
        connection, _ = database.open()
        ledger = Ledger(connection, settings, Clocks())
        writer = Writer(connection, ledger, changed=lambda _: None, broken=lambda _: None)
        reader = Reader(database, settings)
        follower = Told(settings, writer, reader)
        follower.leader = Leader()
        follower._owed_at = math.inf  # owed streams are tried when the scene says so
        try:
            await follower._round()
            await scene(follower, follower.leader)
        finally:
            await writer.close()
            reader.close()
            connection.close()
            database.close()

    asyncio.run(run())


def raising(error: EvermarkError) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


NO_ANSWER = [BusyError("answered with 500 failed"), UnreachableError("it does not answer")]


@pytest.mark.parametrize("error", NO_ANSWER, ids=lambda error: str(error.kind))
def test_a_stream_that_its_node_cannot_answer_is_owed_and_holds_up_no_other(
    error: EvermarkError, tmp_path: Path
) -> None:
    """GIVEN a node that fails about one stream WHEN it is followed THEN the others are copied, and it later."""

    async def scene(follower: Told, leader: Leader) -> None:
        leader.said["bad"] = raising(error)
        for stream in ("before", "bad", "after"):
            leader.grow(stream)
        await follower._round()
        assert (await follower.has(), await follower.owes()) == ({"before": 1, "after": 1}, ["bad"])
        leader.grow("bad", 2)
        leader.grow("later")
        tried = leader.asked.count("/v1/streams/bad")
        await follower._round()
        assert "later" in await follower.has()
        assert leader.asked.count("/v1/streams/bad") == tried, "an owed stream is not waited for in its round"
        del leader.said["bad"]
        await follower._pay()
        assert (await follower.has(), await follower.owes()) == ({"before": 1, "after": 1, "later": 1, "bad": 2}, [])

    following(tmp_path, scene)


def test_a_node_that_answers_nothing_owes_no_stream(tmp_path: Path) -> None:
    """GIVEN a node that goes away within a round WHEN it is back THEN all is copied in order, and nothing was owed."""

    async def scene(follower: Told, leader: Leader) -> None:
        for stream in ("one", "two"):
            leader.grow(stream)

        def away() -> Any:
            leader.listed = raising(UnreachableError("away"))
            raise UnreachableError("away")

        leader.said["one"] = away
        with pytest.raises(UnreachableError):
            await follower._round()
        assert (await follower.has(), await follower.owes()) == ({}, [])
        leader.listed = None
        leader.said.clear()
        await follower._round()
        assert list(await follower.has()) == ["one", "two"]

    following(tmp_path, scene)


@pytest.mark.parametrize("reset", [False, True], ids=["continued", "reset"])
def test_a_node_that_says_more_and_brings_nothing_is_not_asked_for_ever(tmp_path: Path, reset: bool) -> None:
    """GIVEN a node that says `more` for ever WHEN it is followed THEN that stream is owed, the others are copied."""

    async def scene(follower: Told, leader: Leader) -> None:
        blocks = [block.wire() for block in chain("bad", 2)]
        cookie = chain("bad", 2)[-1].cookie.wire()
        whole = {"reset": True, "blocks": blocks, "minipool": [], "cookie": cookie, "more": True}
        again = whole if reset else whole | {"reset": False, "blocks": []}
        answers = iter([whole])
        leader.said["bad"] = lambda: next(answers, again)
        leader.grow("bad", 2)
        leader.grow("good")
        await asyncio.wait_for(follower._round(), 10)
        assert leader.asked.count("/v1/streams/bad") == 2
        assert ("good" in await follower.has(), await follower.owes()) == (True, ["bad"])

    following(tmp_path, scene)


@pytest.mark.parametrize(
    ("numbers", "touched"),
    [([10], 10), ([5], 30), ([30, 20], 30), ([20], 15), ([], 5), ([20], 2**63), ([20], float("inf"))],
    ids=["repeated", "before", "unordered", "less", "back", "beyond", "infinite"],
)
def test_a_listing_that_is_out_of_order_is_refused(tmp_path: Path, numbers: list[int], touched: float) -> None:
    """GIVEN a listing read up to 10 WHEN the next does not go on from there THEN nothing of it is taken."""

    async def scene(follower: Told, leader: Leader) -> None:
        leader.grow("known")
        await follower._round()
        rows = [{"stream": "next", "touched": number, "deleted": False} for number in numbers]
        leader.listed = lambda: {"node": "n", "streams": rows, "touched": touched}
        leader.said["next"] = lambda: {"reset": True}
        with pytest.raises(FormatError):
            await follower._round()
        assert (await follower.has(), await follower.owes()) == ({"known": 1}, [])
        assert follower.progress()["touched"] == 10

    following(tmp_path, scene)


def test_owed_streams_are_tried_in_turns_however_many_never_heal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a hundred streams that never heal, and one that did WHEN some are tried at once THEN it is tried."""
    monkeypatch.setattr(follow_module, "_OWED_FOR_S", 0.0)

    async def scene(follower: Told, leader: Leader) -> None:
        names = [*(f"a{number:02}" for number in range(100)), "healed"]
        for stream in names:
            leader.said[stream] = dict
            leader.grow(stream)
        await follower._round()
        assert await follower.owes() == names
        del leader.said["healed"]
        for _ in range(7):
            await follower._pay()
        assert (await follower.has(), await follower.owes()) == ({"healed": 1}, names[:-1])
        before = leader.asked.count("/v1/streams/a00")
        await follower._pay()
        assert leader.asked.count("/v1/streams/a00") == before + 1, "then they begin anew"

    following(tmp_path, scene)


@pytest.mark.parametrize("body", [b"<html>", b"[" * 200_000], ids=["html", "deep"])
def test_an_answer_that_is_no_json_is_like_none(body: bytes) -> None:
    """GIVEN an answer that cannot be read WHEN it is read THEN the node counts as one that does not answer."""
    with pytest.raises(UnreachableError):
        answer_of("http://told/v1/streams", 200, body)
