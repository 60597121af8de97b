"""The receiver kit's memory in a file: kept over restarts and kills, shared by workers, never wrong when it fails.

What it has in common with the memory in a process is asked in test_receiver_dedup.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evermark_receiver import (
    Claim,
    DedupCache,
    DedupError,
    Event,
    Receiver,
    SqliteDedup,
    State,
    sign,
    sqlite_dedup,
    sqlite_file,
)
from evermark_receiver.sqlite_file import open_file

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
STREAM = ("shop", "public.orders")
QUIET = ("shop", "quiet")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "handled.sqlite"


@pytest.fixture
def make(path: Path) -> Iterator[Callable[..., SqliteDedup]]:
    """A worker's own view of the one file, at each call."""
    made: list[SqliteDedup] = []

    def worker(**options: Any) -> SqliteDedup:
        made.append(SqliteDedup(path, **{"fsync": False, "busy_timeout_s": 0.05, **options}))
        return made[-1]

    yield worker
    for dedup in made:
        dedup.close()


Make = Callable[..., SqliteDedup]


def remember(dedup: SqliteDedup, delivery_id: str, stream: tuple[str, str] = STREAM) -> None:
    dedup.done(dedup.claim(stream, delivery_id))


def delivery(*event_ids: str) -> tuple[dict[str, str], bytes]:
    """A signed request: one event alone, several as a bundle."""
    items = [
        {
            "type": "t",
            "data": {},
            "evermark": {"v": 1, "id": one, "source": "shop", "stream": "public.orders", "op": "x"},
        }
        for one in event_ids
    ]
    body = json.dumps(items[0] if len(items) == 1 else {"events": items}).encode()
    return sign("+".join(event_ids), int(time.time()), body, SECRET), body


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another program that writes and does not come to its end."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def script(text: str, *arguments: object) -> subprocess.Popen[str]:
    head = "import os, sys\nfrom evermark_receiver import SqliteDedup, State\nSTREAM = ('shop', 'public.orders')\n"
    command = [sys.executable, "-c", head + text, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_one_worker_knows_every_worker_knows(make: Make) -> None:
    """GIVEN two workers WHEN one claims, fails and succeeds THEN the other sees each, also after a restart."""
    one, other = make(), make()
    claim = one.claim(STREAM, "a")
    assert other.claim(STREAM, "a").state is State.IN_PROGRESS
    one.release(claim)
    assert other.state(STREAM, "a") is State.UNSEEN
    remember(one, "a")
    assert other.claim(STREAM, "a").state is State.DONE
    one.close()
    other.close()
    assert make().claim(STREAM, "a").state is State.DONE


def test_a_second_worker_answers_409_during_handling_and_200_after(make: Make) -> None:
    """GIVEN a handler at work in one worker WHEN the event comes to another THEN 409; once done, a duplicate."""
    seen: list[str] = []
    other = Receiver(SECRET, dedup=make(), handler=lambda event: seen.append(event.id))
    statuses: list[int] = []
    one = Receiver(SECRET, dedup=make(), handler=lambda _: statuses.append(other.handle(*delivery("a")).status))
    assert one.handle(*delivery("a")).status == 200
    assert statuses == [409]
    assert [e.id for e in other.handle(*delivery("a")).duplicates] == ["a"]
    assert seen == []


def test_no_lock_is_held_while_a_handler_runs(make: Make, path: Path) -> None:
    """GIVEN a handler at work WHEN another program writes to the file THEN it need not wait."""

    def handler(event: Event) -> None:
        with locked(path):
            pass

    assert Receiver(SECRET, dedup=make(), handler=handler).handle(*delivery("a")).status == 200


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_killed_worker_forgets_nothing_it_had_done(make: Make, path: Path, seed: int) -> None:
    """GIVEN a worker killed at any moment WHEN the file is opened THEN what it called done is done, the file whole."""
    worker = script(
        "from itertools import count\n"
        "dedup = SqliteDedup(sys.argv[1])\n"
        "for n in count():\n"
        "    dedup.done(dedup.claim(STREAM, str(n)))\n"
        "    print(n, flush=True)\n",
        path,
    )
    with worker:
        for _ in range(random.Random(seed).randrange(20, 200)):
            last = line_of(worker)
        worker.kill()
        assert worker.stdout is not None
        ended = [last, *worker.stdout.read().split()]
    dedup = make()
    assert all(dedup.state(STREAM, str(n)) is State.DONE for n in range(int(ended[-1]) + 1))
    assert len(dedup) <= int(ended[-1]) + 2


def test_a_worker_killed_in_its_handler_blocks_its_event_for_a_bounded_time(make: Make, path: Path) -> None:
    """GIVEN a worker killed while handling WHEN another gets the event THEN 409 at first, handled after the time."""
    worker = script(
        "dedup = SqliteDedup(sys.argv[1])\nprint(dedup.claim(STREAM, 'a').state, flush=True)\nsys.stdin.read()\n", path
    )
    with worker:
        assert line_of(worker) == "State.UNSEEN"
        worker.kill()
    taken: list[str] = []
    early = Receiver(SECRET, dedup=make(), handler=lambda event: taken.append(event.id))
    assert (early.handle(*delivery("a")).status, taken) == (409, [])
    late_dedup = make(clock=lambda: time.time() + 301)
    late = Receiver(SECRET, dedup=late_dedup, handler=lambda event: taken.append(event.id))
    assert (late.handle(*delivery("a")).status, taken, late_dedup.abandoned) == (200, ["a"], 1)


def test_of_many_processes_that_start_at_once_exactly_one_gets_an_id(path: Path) -> None:
    """GIVEN no file and four workers WHEN all make it and claim the same ids THEN each id is given out once."""
    workers = [
        script(
            "sys.stdin.readline()\n"
            "dedup = SqliteDedup(sys.argv[1], busy_timeout_s=60)\n"
            "print(*[n for n in range(100) if dedup.claim(STREAM, str(n)).state is State.UNSEEN], flush=True)\n",
            path,
        )
        for _ in range(4)
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    won: list[int] = []
    for worker in workers:
        with worker:
            won.extend(map(int, line_of(worker).split()))
        assert worker.returncode == 0
    assert sorted(won) == list(range(100))


def test_a_file_that_another_worker_makes_meanwhile_is_used(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a worker that found no file WHEN another makes and fills it first THEN it is taken as it is."""
    real = sqlite_file._use_wal

    def overtaken(*given: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sqlite_file, "_use_wal", real)
            remember(make(), "a")
        real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "_use_wal", overtaken)
        open_file(path, time.monotonic() + 1).close()
    assert make().state(STREAM, "a") is State.DONE


def test_a_file_that_another_worker_looks_at_is_waited_for(
    make: Make, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a new file that another worker reads WHEN it is to get its write-ahead log THEN the wait is tried again."""
    waits: list[float] = []
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        other.execute("SELECT count(*) FROM sqlite_master")

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            other.execute("ROLLBACK")

        monkeypatch.setattr(time, "sleep", sleep)
        # WHEN all of its time has gone by with waiting THEN it tries once more all the same
        open_file(path, time.monotonic()).close()
    assert len(waits) == 1
    remember(make(), "a")


def test_a_fork_shares_the_file_and_not_the_connection(make: Make, path: Path) -> None:
    """GIVEN a worker that forks with the file open WHEN both go on and the parent closes THEN nothing is lost."""
    process = script(
        "dedup = SqliteDedup(sys.argv[1])\n"
        "def remember(name): dedup.done(dedup.claim(STREAM, name))\n"
        "remember('before')\n"
        "held = dedup.claim(STREAM, 'held')\n"
        "to_parent, to_child = os.pipe(), os.pipe()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    ok = dedup.claim(STREAM, 'before').state is State.DONE\n"
        "    ok &= dedup.claim(STREAM, 'held').state is State.IN_PROGRESS\n"
        "    remember('child 1')\n"
        "    os.write(to_parent[1], b'x')\n"
        "    os.read(to_child[0], 1)\n"
        "    remember('child 2')\n"
        "    os._exit(0 if ok else 1)\n"
        "os.read(to_parent[0], 1)\n"
        "remember('parent')\n"
        "dedup.done(held)\n"
        "dedup.close()\n"
        "os.write(to_child[1], b'x')\n"
        "print(os.waitpid(pid, 0)[1], flush=True)\n",
        path,
    )
    with process:
        assert line_of(process) == "0"
    dedup = make()
    names = ["before", "held", "child 1", "parent", "child 2"]
    assert [dedup.state(STREAM, name) for name in names] == [State.DONE] * 5


def test_a_locked_file_is_answered_503_and_the_event_is_handled_later(make: Make, path: Path) -> None:
    """GIVEN a file that another program holds WHEN an event comes THEN 503 with Retry-After, no handler; later 200."""
    taken: list[str] = []
    receiver = Receiver(SECRET, dedup=make(), handler=lambda event: taken.append(event.id))
    with locked(path):
        refused = receiver.handle(*delivery("a"))
    assert refused.status == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert str(path).encode() not in refused.body
    assert taken == []
    assert receiver.handle(*delivery("a")).status == 200
    assert (taken, receiver.counters.received, receiver.counters.unavailable) == (["a"], 2, 1)


def test_a_success_that_cannot_be_written_is_answered_503_and_written_later(
    make: Make, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN a file locked when a handler ends WHEN the event comes again THEN a duplicate: handled once, remembered."""
    taken: list[str] = []
    dedup = make()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def handler(event: Event) -> None:
            taken.append(event.id)
            if event.id == "b" and taken.count("b") == 1:
                other.execute("BEGIN IMMEDIATE")

        receiver = Receiver(SECRET, dedup=dedup, handler=handler)
        refused = receiver.handle(*delivery("a", "b", "c"))
        assert (refused.status, [e.id for e in refused.handled]) == (503, ["a", "b"])
        assert receiver.handle(*delivery("b")).status == 503
        other.execute("ROLLBACK")
    again = receiver.handle(*delivery("a", "b", "c"))
    assert (again.status, taken) == (200, ["a", "b", "c"])
    counters = receiver.counters
    assert (counters.unremembered, counters.unavailable, counters.handled, counters.duplicates) == (1, 1, 3, 2)
    assert "cannot remember event 'b'" in caplog.text
    assert make().state(STREAM, "b") is State.DONE


def test_a_failure_that_cannot_be_written_does_not_block_the_event(make: Make, path: Path) -> None:
    """GIVEN a file locked when a handler fails WHEN it is free again THEN the answer was 500, the event is handled."""
    failing, dedup = [True], make()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def handler(event: Event) -> None:
            if failing.pop():
                failing.append(False)
                other.execute("BEGIN IMMEDIATE")
                raise OSError

        receiver = Receiver(SECRET, dedup=dedup, handler=handler)
        assert receiver.handle(*delivery("a")).status == 500
        other.execute("ROLLBACK")
    assert receiver.handle(*delivery("a")).status == 200


def test_what_is_owed_is_written_when_the_worker_ends(make: Make, path: Path) -> None:
    """GIVEN a success that could not be written WHEN the store is closed THEN the next worker knows it."""
    dedup = make()
    claim = dedup.claim(STREAM, "a")
    with locked(path), pytest.raises(DedupError, match="locked"):
        dedup.done(claim)
    dedup.close()
    assert make().state(STREAM, "a") is State.DONE


@contextmanager
def full_database(monkeypatch: pytest.MonkeyPatch, dedup: SqliteDedup) -> Iterator[None]:
    """SQLite's own bound on the file's pages, as if the disk ended there."""

    def bounded(path: Path, deadline: float) -> sqlite3.Connection:
        db = open_file(path, deadline)
        db.execute("PRAGMA max_page_count = 12")
        return db

    dedup.close()
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_dedup, "open_file", bounded)
        yield
    dedup.close()


@contextmanager
def no_larger_files(monkeypatch: pytest.MonkeyPatch, dedup: SqliteDedup) -> Iterator[None]:
    """The kernel refuses to write beyond this size, in the middle of a transaction."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("fault", [full_database, no_larger_files])
def test_a_full_disk_loses_nothing_and_remembers_nothing_wrong(
    make: Make, fault: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a disk that fills up WHEN events come THEN each was done or refused with an error; with room, all go on."""
    dedup = make()
    claimed, ended = list[str](), list[str]()

    def fill() -> None:
        for name in map(str, count()):
            claim = dedup.claim(STREAM, name)
            claimed.append(name)
            dedup.done(claim)
            ended.append(name)

    with fault(monkeypatch, dedup), pytest.raises(DedupError, match="disk"):
        fill()
    assert len(ended) > 5
    # The last one was refused when it was claimed, or its handler had ended: then it is not forgotten either.
    assert all(dedup.state(STREAM, name) is State.DONE for name in claimed)
    assert dedup.state(STREAM, str(len(claimed))) is State.UNSEEN
    remember(make(), "more")


def test_a_file_damaged_at_work_is_answered_503(make: Make, path: Path) -> None:
    """GIVEN pages overwritten under a running worker WHEN events come THEN 503, and no handler is called."""
    dedup = make()
    for n in range(200):
        remember(dedup, str(n))
    dedup.close()
    damage(path)
    taken: list[str] = []
    receiver = Receiver(SECRET, dedup=dedup, handler=lambda event: taken.append(event.id))
    assert {receiver.handle(*delivery(str(n))).status for n in range(20)} == {503}
    assert taken == []
    with pytest.raises(DedupError, match="damaged; stop all workers"):
        make()


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))


def other_program(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE accounts (id INTEGER)")


def newer_version(path: Path) -> None:
    SqliteDedup(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 2")


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda path: path.write_bytes(b"no database" * 100), "no SQLite file"),
        (lambda path: path.mkdir(), "cannot be opened"),
        (other_program, "another program"),
        (newer_version, "has version 2"),
    ],
)
def test_an_unusable_file_is_refused_at_the_start_and_left_alone(
    make: Make, path: Path, prepare: Callable[[Path], object], said: str
) -> None:
    """GIVEN a file that is none of ours WHEN a worker starts THEN an error that names it, and not one byte changed."""
    prepare(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(DedupError, match=said) as caught:
        make()
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_place_that_workers_cannot_share_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a missing folder, or a wait without end WHEN a worker starts THEN it says so; `:memory:` is a file here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DedupError, match="folder has to exist"):
        SqliteDedup(tmp_path / "missing" / "x.sqlite")
    with pytest.raises(ValueError, match="busy_timeout_s"):
        SqliteDedup(tmp_path / "x.sqlite", busy_timeout_s=float("inf"))
    SqliteDedup(":memory:").close()
    assert (tmp_path / ":memory:").is_file()


def test_any_exception_of_a_store_of_your_own_is_answered_503(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a store that raises what it likes WHEN an event comes THEN 503, no handler, the traceback in the log."""

    class Broken(DedupCache):
        def claim(self, stream: tuple[str, str], delivery_id: str) -> Claim:
            raise ConnectionError("store is away")

    taken: list[str] = []
    receiver = Receiver(SECRET, dedup=Broken(), handler=lambda event: taken.append(event.id))
    assert (receiver.handle(*delivery("a")).status, taken) == (503, [])
    assert "store is away" in caplog.text and "Traceback" in caplog.text


def test_a_waiting_store_does_not_hold_up_the_event_loop(make: Make, path: Path) -> None:
    """GIVEN a locked file and an async handler WHEN the store waits THEN the loop goes on, and frees it meanwhile."""
    receiver = Receiver(SECRET, dedup=make(busy_timeout_s=30))

    async def handler(event: Event) -> None:
        return None

    async def scenario() -> int:
        with locked(path):
            task = asyncio.create_task(receiver.handle_async(*delivery("a"), handler))
            await asyncio.to_thread(lambda: None)
        return (await task).status

    assert asyncio.run(scenario()) == 200


def test_a_request_cancelled_while_the_store_waits_gives_its_event_back(make: Make, path: Path) -> None:
    """GIVEN a claim that waits WHEN its request is cancelled, twice THEN the claim ends and is given back."""
    dedup = make(busy_timeout_s=30)
    begun = threading.Event()
    real = dedup.claim

    def claim(stream: tuple[str, str], delivery_id: str) -> Claim:
        begun.set()
        return real(stream, delivery_id)

    dedup.claim = claim  # type: ignore[method-assign]
    taken: list[str] = []

    async def handler(event: Event) -> None:
        taken.append(event.id)

    async def scenario() -> None:
        receiver = Receiver(SECRET, dedup=dedup)
        with locked(path):
            task = asyncio.create_task(receiver.handle_async(*delivery("a"), handler))
            await asyncio.to_thread(begun.wait, 10)
            task.cancel()
            await asyncio.to_thread(lambda: None)
            task.cancel()
            await asyncio.to_thread(lambda: None)
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await receiver.handle_async(*delivery("a"), handler)).status == 200

    asyncio.run(scenario())
    assert taken == ["a"]


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_neither_blocks_nor_remembers_for_ever(make: Make, jump_s: float) -> None:
    """GIVEN a claim and a done id WHEN the clock is set by an hour THEN the claim ends in time, the id stays known."""
    now = [time.time()]
    dedup = make(clock=lambda: now[0])
    dedup.claim(STREAM, "claimed")
    remember(dedup, "done")
    now[0] += jump_s
    assert dedup.claim(STREAM, "claimed").state is State.UNSEEN
    assert dedup.claim(STREAM, "done").state is State.DONE
    now[0] += dedup.ttl_s + abs(jump_s)
    assert dedup.state(STREAM, "done") is State.UNSEEN


def test_cleaning_is_done_in_small_steps(make: Make) -> None:
    """GIVEN many expired ids, or a bound made smaller WHEN calls come THEN each drops a few, and all go in time."""
    now = [time.time()]
    dedup = make(clock=lambda: now[0])
    for n in range(100):
        remember(dedup, str(n))
    smaller = make(max_entries=20, clock=lambda: now[0])
    sizes = [len(smaller)]
    for n in range(100, 110):
        remember(smaller, str(n))
        sizes.append(len(smaller))
    assert sizes[-1] == 20
    assert max(a - b for a, b in pairwise(sizes)) <= 16
    now[0] += dedup.ttl_s
    dedup.claim(STREAM, "x")
    assert 0 < len(dedup) < 20
    dedup.claim(STREAM, "y")
    assert (len(dedup), dedup.streams) == (0, 0)


def test_a_total_made_much_smaller_keeps_the_newest_and_the_quiet(make: Make) -> None:
    """GIVEN a full store WHEN `max_total` is lowered THEN what is done next stays, and the busy stream pays."""
    big = make()
    for n in range(40):
        remember(big, str(n))
    remember(big, "q", QUIET)
    small = make(max_total=3)
    for n in range(5):
        remember(small, f"new {n}", ("shop", "third"))
    assert len(small) == 3
    assert small.state(("shop", "third"), "new 4") is State.DONE
    assert small.state(QUIET, "q") is State.DONE


@given(st.integers(0, 2**32))
@settings(max_examples=15, derandomize=True, deadline=None)
def test_any_order_of_calls_is_answered_as_by_the_cache(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    """GIVEN any calls at any times WHEN both stores get them THEN they answer alike, and the file's books are right."""
    rng, now = random.Random(seed), [1000.0]
    bounds: dict[str, Any] = {"max_entries": 4, "max_in_progress": 5, "ttl_s": 20, "progress_ttl_s": 7}
    cache = DedupCache(**bounds, clock=lambda: now[0])
    path = tmp_path_factory.mktemp("alike") / "x.sqlite"
    claims: list[tuple[Claim, Claim]] = []
    with SqliteDedup(path, **bounds, fsync=False, clock=lambda: now[0]) as dedup:
        for _ in range(120):
            call = rng.choice(["claim", "claim", "done", "done", "release", "tick"])
            if call == "claim":
                what = ("s", str(rng.randrange(3))), str(rng.randrange(8))
                claims.append((cache.claim(*what), dedup.claim(*what)))
                assert claims[-1][0].state is claims[-1][1].state
            elif call == "tick":
                now[0] += rng.choice([0.5, 1, 8, 25])
            elif claims:
                ours, theirs = claims.pop(rng.randrange(len(claims)))
                getattr(cache, call)(ours)
                getattr(dedup, call)(theirs)
    with closing(sqlite3.connect(path)) as db:
        held = dict(db.execute("SELECT number, held FROM streams"))
        assert held == dict(db.execute("SELECT stream, count(*) FROM done GROUP BY stream"))
