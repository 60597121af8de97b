"""What every `CopyStore` promises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from evermark.errors import BusyError, ConflictError, NotFoundError, StaleError
from evermark.sources.copies import (
    CANCELLED,
    TEXT_MAX,
    AskedBy,
    Bounds,
    ChunkState,
    CopyState,
    CopyStore,
    Fate,
    Mark,
    fate_of,
)
from evermark.testing.contracts.scene import TakeOver

_BOUNDS: list[Bounds] = [(None, ("5", "ä")), (("5", "ä"), ("9", "")), (("9", ""), None)]
_ALL = list(ChunkState)


class CopyContract:
    @pytest.fixture
    def copies(self) -> CopyStore:
        raise NotImplementedError("override this fixture with a store that is empty")

    @pytest.fixture
    def take_over(self) -> TakeOver:
        raise NotImplementedError("override this fixture: a new owner of source `shop`; returns its epoch")

    @pytest.fixture
    def epoch(self, take_over: TakeOver) -> int:
        return take_over()

    def test_each_stream_is_copied_once_for_the_file(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN streams wanted WHEN asked again with one more THEN only that one is new; a person's are their own."""
        copies.want("shop", ["a", "b"], epoch)
        copies.want("shop", ["a", "b", "c"], epoch)
        assert sorted(c.stream for c in copies.listed("shop")) == ["a", "b", "c"]
        asked = copies.request("shop", "a", "id > 3")
        assert copies.request("shop", "a", "id > 3") == asked and asked.asked_by is AskedBy.PERSON
        assert copies.request("bank", "a", "").source == "bank"
        assert len(copies.listed("shop")) == 4 and len(copies.listed()) == 5
        assert copies.listed("shop")[0] == asked

    def test_who_listens_hears_of_a_request_at_once(self, copies: CopyStore) -> None:
        """GIVEN one who listens WHEN a person asks THEN the source is told, and nothing of what nobody asked."""
        with copies.requests() as heard:
            copies.request("shop", "a", "")
            assert set(heard(10.0)) == {"shop"}
            later = threading.Timer(0.2, copies.request, ("bank", "a", ""))
            later.start()
            began = time.monotonic()
            assert set(heard(10.0)) == {"bank"} and time.monotonic() - began < 5.0
            later.join()
            assert not heard(0.05)
        copies.request("shop", "b", "")  # nobody listens, which is all right

    def test_the_life_of_a_chunk(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN a plan WHEN chunks are written and passed THEN each is counted, and the last ends the copy."""
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, _BOUNDS, epoch)
        copies.plan(copy.id, [], epoch)  # as it is planned, it stays
        assert [c.bounds for c in copies.chunks(copy.id, _ALL)] == _BOUNDS
        for number in range(3):
            mark = Mark(copy.id, number, copies.begin(copy.id, number, epoch))
            assert fate_of(copies.chunk(copy.id, number), mark.attempt) is Fate.PENDING
            assert copies.ready(mark, f"p{number}", 10 + number, epoch)
            assert fate_of(copies.chunk(copy.id, number), mark.attempt) is Fate.READY
            with pytest.raises(BusyError):
                copies.begin(copy.id, number, epoch)
        (first, *_) = copies.chunks(copy.id, [ChunkState.READY], 1)
        assert (first.position, first.rows, first.file, first.attempt) == ("p0", 10, f"{copy.id}-0-1.rows", 1)
        copies.done(copy.id, [0, 1], epoch)
        (under_way,) = copies.listed("shop")
        assert (under_way.state, under_way.chunks_left, under_way.rows) == (CopyState.RUNNING, 1, 21)
        copies.done(copy.id, [2], epoch)
        (over,) = copies.listed("shop")
        assert (over.state, over.chunks, over.chunks_left, over.rows) == (CopyState.DONE, 3, 0, 33)
        assert copies.chunk(copy.id, 0) is None  # a mark of it is void now

    def test_an_attempt_is_decided_once(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN an attempt WHEN a reader gives it up, or it is ready first THEN the other comes too late."""
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, _BOUNDS, epoch)
        first = Mark(copy.id, 0, copies.begin(copy.id, 0, epoch))
        copies.give_up(first)
        assert not copies.ready(first, "p", 1, epoch)
        assert fate_of(copies.chunk(copy.id, 0), first.attempt) is Fate.VOID
        second = Mark(copy.id, 0, copies.begin(copy.id, 0, epoch))
        assert second.attempt == 2
        copies.give_up(first)  # late, and of no effect
        assert copies.ready(second, "p", 1, epoch)
        copies.give_up(second)
        assert fate_of(copies.chunk(copy.id, 0), second.attempt) is Fate.READY
        assert fate_of(copies.chunk(copy.id, 0), first.attempt) is Fate.VOID
        copies.reopen(copy.id, 0, epoch)
        assert fate_of(copies.chunk(copy.id, 0), second.attempt) is Fate.VOID
        third = Mark(copy.id, 0, copies.begin(copy.id, 0, epoch))
        copies.give_up_all("shop", epoch)
        assert not copies.ready(third, "p", 1, epoch)
        copies.done(copy.id, [0], epoch)  # not ready: stays open
        assert [c.number for c in copies.chunks(copy.id, [ChunkState.OPEN])] == [0, 1, 2]

    def test_chunks_are_placed_behind_the_horizon(self, copies: CopyStore, take_over: TakeOver) -> None:
        """GIVEN a stream without marks WHEN chunks are placed THEN each stands behind the last and behind all that
        reading had reached; an attempt that was given up stands nowhere, and keeps no place."""
        epoch = take_over()
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, _BOUNDS, epoch)
        seen: list[str | None] = []

        def choose(horizon: str | None) -> tuple[str, str]:
            seen.append(horizon)
            return f"{horizon}-", f"{horizon}-x"

        def began(number: int) -> Mark:
            return Mark(copy.id, number, copies.begin(copy.id, number, epoch))

        copies.reach("shop", "p2", epoch)
        copies.reach("shop", "p1", epoch)  # it never goes back
        first, second = began(0), began(1)
        assert copies.placed("shop", "") == []
        assert copies.place(second, choose, epoch) == "p2-"
        copies.reach("shop", "p3", epoch)
        assert copies.place(first, choose, epoch) == "p3-"
        assert copies.ready(first, "p3-", 4, epoch)
        assert seen == ["p2", "p3"]
        assert [(c.number, c.state, c.position) for c in copies.placed("shop", "p2-")] == [
            (1, ChunkState.WRITING, "p2-"),
            (0, ChunkState.READY, "p3-"),
        ]
        assert [c.number for c in copies.placed("shop", "p3")] == [0] and copies.placed("bank", "") == []
        copies.give_up(second)
        assert [c.number for c in copies.placed("shop", "")] == [0]
        assert copies.place(second, choose, epoch) is None
        again = began(1)
        assert [c.number for c in copies.placed("shop", "")] == [0], "a new attempt has no place yet"
        assert copies.place(again, choose, epoch) == "p3-x-"
        copies.done(copy.id, [0], epoch)
        assert [c.number for c in copies.placed("shop", "")] == [1]

    def test_a_chunk_that_was_lost_in_part_knows_who_has_it(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN rows that some partitions have WHEN the others' are lost THEN every attempt knows it."""
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, _BOUNDS, epoch)
        for told in ([2, 0], [0, 3], []):
            mark = Mark(copy.id, 0, copies.begin(copy.id, 0, epoch))
            assert copies.ready(mark, "p", 1, epoch)
            copies.reopen(copy.id, 0, epoch, told)
        (chunk, *_) = copies.chunks(copy.id, [ChunkState.OPEN])
        assert chunk.told == (0, 2, 3)

    def test_an_empty_table_is_copied_at_once(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN no chunks WHEN it is planned THEN it is done."""
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, [], epoch)
        assert copies.listed("shop")[0].state is CopyState.DONE

    def test_trouble_is_counted_and_ends(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN errors WHEN one is final THEN it is failed, until the file asks again; a good round forgets them."""
        copies.want("shop", ["a"], epoch)
        (copy,) = copies.listed("shop")
        copies.trouble(copy.id, "x" * (TEXT_MAX + 1), epoch)
        copies.trouble(copy.id, "again", epoch)
        copies.trouble(copy.id, "the source is away", epoch, counts=False)
        (found,) = copies.listed("shop")
        assert (found.tries, found.error, found.state) == (2, "the source is away", CopyState.PLANNED)
        copies.trouble(copy.id, "", epoch)
        assert copies.listed("shop")[0].tries == 0
        copies.trouble(copy.id, "no key", epoch, failed=True)
        (found,) = copies.listed("shop")
        assert (found.state, found.error) == (CopyState.FAILED, "no key")
        copies.want("shop", ["a"], epoch)
        (found,) = copies.listed("shop")
        assert (found.state, found.error, found.tries) == (CopyState.PLANNED, "", 0)

    def test_a_person_cancels_what_a_person_asked_for(self, copies: CopyStore, epoch: int) -> None:
        """GIVEN copies WHEN cancelled THEN no chunk is begun by it any more, what is ready is told and counted; one
        that the file asks for, and one that is over, stay as they are."""
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, _BOUNDS, epoch)
        mark = Mark(copy.id, 0, copies.begin(copy.id, 0, epoch))
        assert copies.ready(mark, "p0", 7, epoch)
        cancelled = copies.cancel(copy.id)
        assert (cancelled.state, cancelled.error, cancelled.chunks_left) == (CopyState.FAILED, CANCELLED, 3)
        assert fate_of(copies.chunk(copy.id, 0), mark.attempt) is Fate.READY
        copies.done(copy.id, [0], epoch)
        assert copies.listed("shop")[0].rows == 7
        assert copies.request("shop", "a", "").id != copy.id, "asked for again, it is another one"
        copies.want("shop", ["b"], epoch)
        (wanted,) = (each for each in copies.listed("shop") if each.stream == "b")
        with pytest.raises(ConflictError):
            copies.cancel(wanted.id)
        with pytest.raises(NotFoundError):
            copies.cancel("nothing")
        empty = copies.request("shop", "c", "")
        copies.plan(empty.id, [], epoch)
        assert copies.cancel(empty.id).state is CopyState.DONE

    def test_stale_owners_write_nothing(self, copies: CopyStore, take_over: TakeOver) -> None:
        """GIVEN an old epoch WHEN anything but a person's or reader's word is written THEN it is refused."""
        old = take_over()
        copy = copies.request("shop", "a", "")
        copies.plan(copy.id, _BOUNDS, old)
        mark = Mark(copy.id, 0, copies.begin(copy.id, 0, old))
        take_over()
        writes: list[Callable[[], object]] = [
            lambda: copies.want("shop", ["b"], old),
            lambda: copies.plan(copy.id, _BOUNDS, old),
            lambda: copies.begin(copy.id, 1, old),
            lambda: copies.ready(mark, "p", 1, old),
            lambda: copies.give_up_all("shop", old),
            lambda: copies.done(copy.id, [0], old),
            lambda: copies.reopen(copy.id, 0, old),
            lambda: copies.reach("shop", "p", old),
            lambda: copies.place(mark, lambda _: ("p", "q"), old),
            lambda: copies.trouble(copy.id, "x", old, failed=True),
        ]
        for write in writes:
            with pytest.raises(StaleError):
                write()
        assert [c.state for c in copies.chunks(copy.id, _ALL)] == [ChunkState.WRITING, ChunkState.OPEN, ChunkState.OPEN]
        with pytest.raises(NotFoundError):
            copies.begin("nothing", 0, old)
