"""The receiver kit's memory of what was handled: states, bounds, fairness between streams.

What both stores promise is asked of both; `make` makes either, empty.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evermark_receiver import Claim, DedupCache, SqliteDedup, State

STREAM = ("shop", "public.orders")
QUIET = ("shop", "quiet")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Either = DedupCache | SqliteDedup
Make = Callable[..., Either]


@pytest.fixture(scope="module", params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """A new, empty store at each call."""
    folder, numbers, made = tmp_path_factory.mktemp("dedup"), count(), list[SqliteDedup]()

    def memory(**options: Any) -> Either:
        return DedupCache(**options)

    def sqlite(**options: Any) -> Either:
        made.append(SqliteDedup(folder / f"{next(numbers)}.sqlite", fsync=False, **options))
        return made[-1]

    yield memory if request.param == "memory" else sqlite
    for dedup in made:
        dedup.close()


def remember(cache: Either, stream: tuple[str, str], delivery_id: str) -> None:
    cache.done(cache.claim(stream, delivery_id))


def test_an_id_is_remembered_only_after_success(make: Make) -> None:
    """GIVEN a claimed id WHEN it is released THEN it is unseen again; WHEN it is done THEN it is done."""
    cache = make()
    claim = cache.claim(STREAM, "a")
    assert claim.state is State.UNSEEN
    assert cache.claim(STREAM, "a").state is State.IN_PROGRESS
    cache.release(claim)
    assert cache.state(STREAM, "a") is State.UNSEEN
    remember(cache, STREAM, "a")
    assert cache.claim(STREAM, "a").state is State.DONE


def test_the_default_window_covers_the_senders_retries(make: Make) -> None:
    """GIVEN the default retry schedule WHEN its last attempt comes THEN the id is still remembered."""
    clock = Clock()
    cache = make(clock=clock)
    remember(cache, STREAM, "a")
    clock.now += sum([5, 5 * 60, 30 * 60, 2 * 3600, 5 * 3600, 10 * 3600, 10 * 3600]) * 1.2
    assert cache.claim(STREAM, "a").state is State.DONE


def test_an_id_is_forgotten_after_its_time_and_memory_is_given_back(make: Make) -> None:
    """GIVEN ids of several streams WHEN their time is over THEN they are unseen, and calls elsewhere free them."""
    clock = Clock()
    cache = make(ttl_s=60, clock=clock)
    for n in range(20):
        remember(cache, ("shop", f"s{n}"), "a")
    clock.now += 60
    assert cache.state(("shop", "s0"), "a") is State.UNSEEN
    for n in range(30):
        cache.release(cache.claim(STREAM, f"x{n}"))
    assert (len(cache), cache.streams, cache.expired) == (0, 0, 20)


def test_an_abandoned_handler_gives_its_id_up_after_a_bounded_time(make: Make) -> None:
    """GIVEN a claim never ended WHEN progress_ttl_s passed THEN the next claim gets it, the late one does no harm."""
    clock = Clock()
    cache = make(progress_ttl_s=30, clock=clock)
    late = cache.claim(STREAM, "a")
    clock.now += 30
    second = cache.claim(STREAM, "a")
    assert second.state is State.UNSEEN
    assert cache.abandoned == 1
    cache.release(late)
    assert cache.state(STREAM, "a") is State.IN_PROGRESS
    cache.done(late)
    cache.release(second)
    assert cache.state(STREAM, "a") is State.DONE


def test_ids_in_progress_are_bounded(make: Make) -> None:
    """GIVEN the most handlers at work WHEN another id is claimed THEN it has to wait until one ends."""
    cache = make(max_in_progress=2)
    first = cache.claim(STREAM, "a")
    cache.claim(STREAM, "b")
    assert cache.claim(STREAM, "c").state is State.IN_PROGRESS
    cache.done(first)
    assert cache.claim(STREAM, "c").state is State.UNSEEN


def test_names_that_run_together_are_different_ids(make: Make) -> None:
    """GIVEN (ab, c) and (a, bc) WHEN one is done THEN the other is unseen; lone surrogates are ids like any other."""
    cache = make()
    remember(cache, ("s", "ab"), "c")
    remember(cache, ("s", "\ud800"), "c")
    assert cache.state(("s", "a"), "bc") is State.UNSEEN
    assert cache.state(("sa", "b"), "c") is State.UNSEEN
    assert cache.state(("s", "\ud800"), "c") is State.DONE


@given(quiet=st.integers(1, 9), seed=st.integers(0, 2**32), streams=st.integers(1, 30))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_busy_streams_never_evict_a_quiet_streams_ids(make: Make, quiet: int, seed: int, streams: int) -> None:
    """GIVEN a quiet stream within its share WHEN any others flood the cache THEN all its ids stay, all bounds hold."""
    rng = random.Random(seed)
    cache = make(max_entries=30, max_streams=4, max_total=50)
    for n in range(quiet):
        remember(cache, QUIET, f"q{n}")
    remembered = quiet
    for n in range(200):
        # Squared: a few streams are much busier than the rest, as they are.
        busy = ("busy", str(int(rng.random() ** 2 * streams)))
        claim = cache.claim(busy, str(rng.randrange(n + 1)))
        remembered += claim.state is State.UNSEEN
        cache.done(claim)
        assert len(cache) <= 50
        assert cache.streams <= 4
        assert len(cache) + cache.evicted == remembered
    assert cache.evicted > 0
    assert all(cache.state(QUIET, f"q{n}") is State.DONE for n in range(quiet))


def test_an_id_handled_again_after_its_time_is_remembered_for_its_whole_new_time(make: Make) -> None:
    """GIVEN an expired id not yet swept WHEN it is done again THEN it is the youngest, and counted once."""
    clock = Clock()
    cache = make(max_entries=2, ttl_s=60, clock=clock)
    claim = cache.claim(STREAM, "a")
    cache.done(claim)
    clock.now += 30
    remember(cache, STREAM, "b")
    clock.now += 30
    cache.done(claim)
    assert len(cache) == 2
    remember(cache, STREAM, "c")
    assert cache.state(STREAM, "a") is State.DONE
    assert cache.state(STREAM, "b") is State.UNSEEN


@given(st.lists(st.integers(0, 60), max_size=300))
@settings(max_examples=25, derandomize=True, deadline=None)
def test_one_stream_forgets_its_oldest_id_first(make: Make, ids: Sequence[int]) -> None:
    """GIVEN one stream WHEN more ids than fit are done THEN exactly the last ones are remembered."""
    cache = make(max_entries=10)
    order: list[int] = []
    for n in ids:
        claim = cache.claim(STREAM, str(n))
        assert (claim.state is State.DONE) == (n in order)
        if claim.state is State.UNSEEN:
            order = [*order, n][-10:]
        cache.done(claim)
    assert len(cache) == len(order)


@given(st.integers(0, 2**32))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_order_of_calls_keeps_the_books(seed: int) -> None:
    """GIVEN any calls at any times WHEN they are made THEN bounds hold and the sizes kept are the real ones."""
    rng = random.Random(seed)
    clock = Clock()
    cache = DedupCache(
        max_entries=4, max_streams=3, max_total=9, max_in_progress=5, ttl_s=20, progress_ttl_s=7, clock=clock
    )
    claims: list[Claim] = []
    for _ in range(200):
        call = rng.choice(["claim", "claim", "done", "done", "release", "tick"])
        if call == "claim":
            claims.append(cache.claim(("s", str(rng.randrange(6))), str(rng.randrange(6))))
        elif call == "tick":
            clock.now += rng.choice([0.5, 1, 8, 25])
        elif claims:
            getattr(cache, call)(claims.pop(rng.randrange(len(claims))))
        sizes = {place: len(ids) for place, ids in cache._places.items()}
        assert sum(sizes.values()) == len(cache) <= 9
        assert max(sizes.values(), default=0) == cache._size_max <= 4
        assert {(size, place) for size, places in cache._by_size.items() for place in places} == {
            (size, place) for place, size in sizes.items()
        }
        assert cache.streams <= 3
        assert cache.in_progress <= 5


def test_of_many_threads_exactly_one_gets_an_id(make: Make) -> None:
    """GIVEN eight threads WHEN all claim the same ids THEN each id is given out once."""
    cache = make()
    won: list[int] = []
    gate = threading.Barrier(8)

    def claim_all() -> None:
        gate.wait()
        won.extend(n for n in range(200) if cache.claim(STREAM, str(n)).state is State.UNSEEN)

    threads = [threading.Thread(target=claim_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == list(range(200))


@pytest.mark.parametrize("bound", ["max_entries", "max_streams", "max_total", "max_in_progress", "ttl_s"])
def test_a_bound_of_zero_is_refused(make: Make, bound: str) -> None:
    """GIVEN a bound of zero WHEN a cache is made THEN it says so instead of never remembering."""
    with pytest.raises(ValueError, match="bounds"):
        make(**{bound: 0})
