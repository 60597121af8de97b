"""The delivery contract over its backends, both against each other, and races on a real server."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from psycopg.conninfo import make_conninfo

from evermark.checkpoints.reset import reset
from evermark.checkpoints.stores import PostgresCheckpoints
from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.cluster.memory import MemoryLeases
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, SourcePartition
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.store import queries
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.errors import ConflictError, EvermarkError, NotFoundError, StaleError
from evermark.state.connection import State
from evermark.testing.contracts import (
    DeliveryContract,
    ParkedContract,
    ProgressContract,
    RegistrationContract,
    ShardContract,
)
from evermark.testing.contracts.scene import P0, P1, T0, TakeOver, begin, done, event, snapshot, spec
from evermark.testing.contracts.shards import TakeLease
from evermark.testing.servers import PostgresServer
from evermark.testing.states import fresh_state, owners
from evermark.testing.until import until


def steady() -> float:
    """Jitter for tests that compare: none."""
    return 0.0


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with fresh_state(pg_server.socket_dsn()) as state:
        yield state


def _taker(leases: MemoryLeases | PostgresLeases) -> TakeOver:
    take = owners(leases)
    return lambda: take(DELIVER_LEASE)


class TestMemoryDelivery(DeliveryContract, ParkedContract, ProgressContract, RegistrationContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def store(self, leases: MemoryLeases) -> DeliveryStore:
        return MemoryDelivery(leases)

    @pytest.fixture
    def take_over(self, leases: MemoryLeases) -> TakeOver:
        return _taker(leases)


class TestMemoryShards(ShardContract):
    @pytest.fixture
    def leases(self) -> MemoryLeases:
        return MemoryLeases(is_gone=lambda holder: True)

    @pytest.fixture
    def store(self, leases: MemoryLeases) -> DeliveryStore:
        return MemoryDelivery(leases)

    @pytest.fixture
    def take(self, leases: MemoryLeases) -> TakeLease:
        return owners(leases)


class TestPostgresShards(ShardContract):
    @pytest.fixture
    def store(self, state: State) -> DeliveryStore:
        return PostgresDelivery(state)

    @pytest.fixture
    def take(self, state: State) -> TakeLease:
        return owners(PostgresLeases(state, is_gone=lambda holder: True))


class TestPostgresDelivery(DeliveryContract, ParkedContract, ProgressContract, RegistrationContract):
    @pytest.fixture
    def store(self, state: State) -> DeliveryStore:
        return PostgresDelivery(state)

    @pytest.fixture
    def take_over(self, state: State) -> TakeOver:
        return _taker(PostgresLeases(state, is_gone=lambda holder: True))


@pytest.fixture
def take_over(state: State) -> TakeOver:
    return _taker(PostgresLeases(state, is_gone=lambda holder: True))


def _together(*calls: Callable[[], object]) -> list[object]:
    """Run the calls at the same moment; what each returned or raised."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> object:
        barrier.wait()
        try:
            return call()
        except EvermarkError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_two_claims_at_once_never_share_a_row(state: State, take_over: TakeOver) -> None:
    """GIVEN 200 due rows WHEN four threads claim until none is left THEN each row was claimed once."""
    store, epoch = PostgresDelivery(state, jitter=steady), take_over()
    begin(store, epoch, "a")
    store.settle_group(
        GroupWork(P0, Cursor(0), Cursor(200), frozenset("a")), [done("a", *map(event, range(1, 201)))], T0, epoch
    )
    soon = T0 + timedelta(minutes=1)

    def drain() -> list[int]:
        mine: list[int] = []
        while rows := store.parked.claim(soon, 7, 60, epoch):
            mine += [row.id for row in rows]
        return mine

    claimed = [row_id for ids in _together(*[drain] * 4) for row_id in ids]  # type: ignore[attr-defined]
    # `skip locked` may leave rows that another thread held for a moment; one more look finds them.
    claimed += drain()
    assert sorted(claimed) == sorted(row.id for row in store.parked.rows(limit=1000))


def test_joining_while_the_group_settles_misses_nothing(state: State, take_over: TakeOver) -> None:
    """GIVEN a subscription level with the group WHEN it joins as a batch settles THEN it still owes that batch."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "a")
    store.register([spec("a"), spec("b")], MadeBy.FILE, {"b": {P0: Cursor(0), P1: Cursor(0)}}, epoch)
    for batch in range(25):
        work = store.group()
        outcomes = [done(name) for name in work.members]

        def settle(batch: int = batch, work: object = work, outcomes: list[Outcome] = outcomes) -> object:
            members, version = work.members, work.version  # type: ignore[attr-defined]
            return store.settle_group(
                GroupWork(P0, Cursor(batch), Cursor(batch + 1), members, version), outcomes, T0, epoch
            )

        results = _together(settle, lambda: store.join("b", epoch))
        assert not any(isinstance(result, Exception) for result in results), results
        assert store.group().members == {"a"}, "it joined before and was put out again, or came too late"
        assert store.cursors("b") == {P0: Cursor(batch), P1: Cursor(0)}
        store.settle_subscription("b", P0, Cursor(batch), Cursor(batch + 1), done("b"), T0, epoch)


def test_of_two_settlements_of_one_batch_one_wins(state: State, take_over: TakeOver) -> None:
    """A batch is settled once, and the loser leaves nothing behind."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "a")
    for batch in range(10):
        number = iter((2 * batch + 1, 2 * batch + 2))

        def settle(batch: int = batch, number: Iterator[int] = number) -> object:
            outcomes = [done("a", event(next(number)))]
            return store.settle_group(
                GroupWork(P0, Cursor(batch), Cursor(batch + 1), frozenset("a")), outcomes, T0, epoch
            )

        results = _together(settle, settle)
        assert sum(isinstance(result, ConflictError) for result in results) == 1, results
        assert len(store.parked.rows(limit=100)) == batch + 1


def test_a_take_over_in_mid_settlement_is_before_it_or_after_it(state: State, take_over: TakeOver) -> None:
    """GIVEN a settlement and a take-over at once THEN it was refused and left nothing, or is there as a whole."""
    store = PostgresDelivery(state)
    epoch = take_over()
    begin(store, epoch, "a")
    refused = 0
    for batch in range(20):
        before = snapshot(store)
        at = store.group().cursors[P0].batch

        def settle(at: int = at, batch: int = batch, epoch: int = epoch) -> object:
            return store.settle_group(
                GroupWork(P0, Cursor(at), Cursor(at + 1), frozenset("a")), [done("a", event(batch + 1))], T0, epoch
            )

        settled, epoch = _together(settle, take_over)  # type: ignore[assignment]
        if isinstance(settled, StaleError):
            refused += 1
            assert snapshot(store) == before
        else:
            assert not isinstance(settled, Exception), settled
            assert store.group().cursors[P0].batch == at + 1
            assert len(store.parked.rows(limit=100)) == batch + 1 - refused


@pytest.mark.parametrize("seed", range(6))
def test_memory_and_postgres_do_the_same(state: State, take_over: TakeOver, seed: int) -> None:
    """GIVEN the same random calls WHEN both stores carry them out THEN they answer and stand alike."""
    rng = random.Random(seed)
    leases = MemoryLeases(is_gone=lambda holder: True)
    memory, epoch = MemoryDelivery(leases, jitter=steady), _taker(leases)()
    postgres = PostgresDelivery(state, jitter=steady)
    assert take_over() == epoch
    both: tuple[DeliveryStore, ...] = (memory, postgres)
    for store in both:
        begin(store, epoch, "a", "b", parked_max=6, ordered=True)
    for turn in range(60):
        call = _random_call(rng, memory, epoch, turn)
        answers = []
        for store in both:
            try:
                answers.append(call(store))
            except EvermarkError as error:
                answers.append((type(error), error.message))
        assert answers[0] == answers[1], f"seed {seed}, turn {turn}"
        assert snapshot(memory) == snapshot(postgres), f"seed {seed}, turn {turn}"
        names = list(memory.subscriptions())
        assert memory.parked.held_keys(names) == postgres.parked.held_keys(names)
        assert memory.parked.held_keys(names, [P1]) == postgres.parked.held_keys(names, [P1])
        assert memory.parked.room(names) == postgres.parked.room(names)
        assert memory.counted("expired") == postgres.counted("expired")
        assert memory.parked.counts() == postgres.parked.counts()


def test_added_while_the_group_settles_it_misses_nothing(state: State, take_over: TakeOver) -> None:
    """GIVEN a batch that settles WHEN one is added at that moment THEN it owes the batch, or joined after it."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "a")
    for batch in range(25):
        work = store.group()
        outcomes = [done("a")]

        def settle(batch: int = batch, work: object = work, outcomes: list[Outcome] = outcomes) -> object:
            members, version = work.members, work.version  # type: ignore[attr-defined]
            return store.settle_group(
                GroupWork(P0, Cursor(batch), Cursor(batch + 1), members, version), outcomes, T0, epoch
            )

        results = _together(settle, lambda: store.add(spec("new"), None, epoch))
        assert not any(isinstance(result, Exception) for result in results), results
        group = store.group()
        owed = store.cursors("new").get(P0) == Cursor(batch) and "new" not in group.members
        assert owed or ("new" in group.members and group.cursors[P0].batch == batch + 1)
        store.remove("new", epoch)


def test_a_name_asked_for_by_many_at_once_is_given_once(state: State, take_over: TakeOver) -> None:
    """GIVEN eight that add the same name at once THEN one has it; changes and rotations at once are all kept."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch)
    results = _together(*[lambda: store.add(spec("a", secrets=("s",)), None, epoch)] * 8)
    assert sorted(type(result).__name__ for result in results) == ["ConflictError"] * 7 + ["NoneType"]
    assert store.group().members == {"a"}
    changes: list[dict[str, object]] = [{"bundle": 5}, {"where": "op = 'insert'"}, {"ordered": True}]
    rotations = [partial(store.rotate, "a", f"s{n}", None, T0, epoch) for n in range(3)]
    results = _together(*[partial(store.change, "a", change, epoch) for change in changes], *rotations)
    assert results == [None] * 6
    found = store.subscription("a").spec
    assert (found.bundle, found.where, found.ordered) == (5, "op = 'insert'", True)
    assert sorted(found.secrets) == ["s", "s0", "s1", "s2"]


def test_calls_for_one_and_for_all_never_wait_for_each_other(state: State, take_over: TakeOver) -> None:
    """GIVEN everything that writes, from several threads WHEN run at once THEN no deadlock and no unknown error."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "a", "b")

    def one(rng: random.Random) -> list[object]:
        failed: list[object] = []
        for turn in range(60):
            name = rng.choice(["x", "y", "a"])
            at = store.group().cursors[P0].batch
            members = store.group().members
            outcomes = [done(m, event(turn * 10 + rng.randint(0, 9))) for m in members]
            calls: list[Callable[[], object]] = [
                lambda name=name: store.add(spec(name, secrets=("s",)), rng.choice([None, {P0: Cursor(0)}]), epoch),
                lambda name=name: store.change(name, {"url": f"https://{rng.randint(0, 9)}.example"}, epoch),
                lambda name=name: store.remove(name, epoch),
                lambda name=name: store.rotate(name, "t", T0, T0, epoch),
                lambda at=at, m=members, o=outcomes: store.settle_group(
                    GroupWork(P0, Cursor(at), Cursor(at + 1), m), o, T0, epoch
                ),
                lambda: store.register([spec("a"), spec("b", bundle=rng.randint(1, 9))], MadeBy.FILE, {}, epoch),
                lambda name=name: store.suspend(name, "", epoch),
                lambda name=name: store.resume(name, epoch),
                lambda name=name: store.join(name, epoch),
                lambda name=name: store.retried(name, Outcome(name, Fate.ENDPOINT_FAILED), T0, epoch),
            ]
            try:
                rng.choice(calls)()
            except (ConflictError, NotFoundError):
                pass
            except EvermarkError as error:
                failed.append(error)
        return failed

    results = _together(*[partial(one, random.Random(seed)) for seed in range(5)])
    assert results == [[]] * 5, results


def _rates(store: PostgresDelivery, epoch: int, first: int, count: int) -> float:
    """The least time one more takes, of several: a busy machine makes things slower, never faster."""
    took = []
    for number in range(first, first + count):
        begun = time.perf_counter()
        store.add(spec(f"s{number}", secrets=("sealed:1",)), None, epoch)
        took.append(time.perf_counter() - begun)
    return min(took)


def test_thousands_of_subscriptions_stay_cheap(state: State, take_over: TakeOver) -> None:
    """GIVEN 5000 made by the API WHEN one more is made THEN it costs as with ten; listing them is one query, after one
    that asks whether any has changed.
    """
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "file")
    few = _rates(store, epoch, 0, 10)
    with state.connection() as conn:
        conn.execute(
            "insert into subscriptions (name, made_by, spec, state) select 's' || n, 'api',"
            " jsonb_set(spec, '{name}', to_jsonb('s' || n)), case when n % 10 = 0 then 'behind' else 'live' end"
            " from subscriptions, generate_series(10, 4999) n where name = 's0'"
        )
        conn.execute("analyze subscriptions")
    many = _rates(store, epoch, 5000, 10)
    assert many < 4 * few + 0.005, f"{few * 1000:.1f} ms with ten, {many * 1000:.1f} ms with 5000"
    for call in (lambda: store.change("s77", {"bundle": 9}, epoch), lambda: store.remove("s78", epoch)):
        begun = time.perf_counter()
        assert _statements(state, call) < 20
        assert time.perf_counter() - begun < 0.5
    assert store.subscription("s77").spec.bundle == 9
    asked = [_statements(state, store.subscriptions) for _ in range(2)]
    assert len(store.subscriptions()) == 5010
    assert asked == [2, 1]


def test_what_stands_in_front_of_a_row_is_found_by_index(state: State, take_over: TakeOver) -> None:
    """GIVEN thousands parked of one ordered subscription WHEN they are claimed THEN each looks at its own key alone."""
    store, epoch = PostgresDelivery(state), take_over()
    begin(store, epoch, "a", ordered=True)
    parked = [event(n, key=f"k{n % 5}", stream=f"s{n % 7}") for n in range(1, 4_001)]
    store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("a")), [done("a", *parked)], T0, epoch)
    given = {"now": T0 + timedelta(hours=1), "epoch": epoch, "limit": 100, "claimed_until": T0, "of_replays": False}
    given |= {"draw": "", "without": []}
    with state.connection() as conn:
        conn.execute("analyze enqueued_messages")
        plan = "\n".join(row[0] for row in conn.execute(f"explain {queries.CLAIM}", given))
    used = [
        line for line in plan.splitlines() if "Index Cond" in line and ("(key = " in line or "(previous_key" in line)
    ]
    assert len(used) == 4
    assert ("enqueued_messages_held on" in plan, "enqueued_messages_held_left on" in plan) == (True, True)
    for line in used:
        assert all(f"({name} = " in line for name in ("subscription", "source", "partition", "stream"))
    begun = time.perf_counter()
    assert len(store.parked.claim(T0 + timedelta(hours=1), 100, 60, epoch)) == 35
    assert time.perf_counter() - begun < 2


def _park_many(state: State, name: str, rows: int, due: str) -> None:
    with state.connection() as conn:
        conn.execute(
            "insert into enqueued_messages (subscription, event_id, source, partition, batch, position, stream, key,"
            " event, reason, next_attempt_at, created_at) select %s, 'x' || n, 'shop', 0, n, n::text, 'orders',"
            " 'k' || n %% 1000, '{}', 'refused', %s::timestamptz + n * interval '1 ms', now()"
            " from generate_series(1, %s) n",
            (name, due, rows),
        )


def test_a_claim_is_quick_and_fair_however_much_is_due_for_one(state: State, take_over: TakeOver) -> None:
    """GIVEN 50 000 rows due for one, as many for a paused one, and a few for forty others WHEN claimed THEN all have
    their share, found by an index; what is held back is read for whoever is asked about alone.
    """
    store, epoch = PostgresDelivery(state), take_over()
    few = [f"few{n}" for n in range(40)]
    begin(store, epoch, "much", "paused", *few, ordered=True)
    store.suspend("paused", "", epoch)
    for name in ("much", "paused"):
        _park_many(state, name, 50_000, "2026-11-14")
    for name in few:
        _park_many(state, name, 5, "2026-11-15")
    given = {"now": T0, "epoch": epoch, "limit": 100, "claimed_until": T0, "of_replays": False, "draw": ""}
    given["without"] = []
    with state.connection() as conn:
        conn.execute("analyze enqueued_messages")
        plan = "\n".join(row[0] for row in conn.execute(f"explain {queries.CLAIM}", given))
    assert "enqueued_messages_due_of" in plan
    assert "Seq Scan on enqueued_messages" not in plan
    begun = time.perf_counter()
    claimed = Counter(row.subscription for row in store.parked.claim(T0, 100, 60, epoch))
    assert time.perf_counter() - begun < 2
    assert sum(claimed.values()) == 100
    assert set(claimed) == {"much", *few} and max(claimed.values()) <= 3
    held = store.parked.held_keys(["few0", "few1"], [P0])
    assert {name: sum(keys.values()) for name, keys in held.items()} == {"few0": 5, "few1": 5}


def _statements(state: State, call: Callable[[], object]) -> int:
    """How many statements a call sends."""
    sent = []
    with state.connection() as conn:
        real = type(conn).execute

        def counting(self: object, *args: object, **options: object) -> object:
            sent.append(args[0])
            return real(self, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(conn), "execute", counting)
        call()
    return len(sent)


def _random_call(rng: random.Random, store: DeliveryStore, epoch: int, turn: int) -> Callable[[DeliveryStore], object]:
    names = ["a", "b", "c", "d", "x", "y"]
    name, place, now = rng.choice(names), rng.choice([P0, P1]), T0 + timedelta(seconds=20 * turn)

    def outcome(of: str) -> Outcome:
        fate = rng.choice([Fate.DONE, Fate.DONE, Fate.DONE, *Fate])
        number = rng.randint(1, 40)
        stream = rng.choice(["orders", "users"])
        key, left = rng.choice([(None, None), ("k", None), ("l", None), ("k", "l"), ("l", "m")])
        some = replace(event(number, place, key, stream=stream), previous_key=left)
        parked = (some,) if rng.random() < 0.4 else ()
        reached = rng.choice([None, replace(group.cursors[place], through=f"{number:06}")])
        why = ("why", rng.choice([None, 9.0]), rng.randint(0, 1), reached)
        return Outcome(of, fate, rng.randint(0, 2), parked, *why)

    group = store.group()
    behind = store.cursors(name).get(place, Cursor(0))
    through = rng.choice(["", f"{rng.randint(1, 40):06}"])
    at = group.cursors[place].batch - (rng.random() < 0.1)
    outcomes = [outcome(member) for member in [*group.members, name]]
    some = frozenset(rng.sample(names[:4], 3))
    specs = [spec(n, parked_max=6, ordered=n < "c", url=f"https://{rng.randint(0, 1)}.example") for n in sorted(some)]
    starts = {n: {P0: Cursor(rng.randint(0, 2))} for n in names if rng.random() < 0.5}
    ids = [row.id for row in store.parked.rows()] or [1]
    one = rng.choice(ids)
    single = outcome(name)
    dead = rng.random() < 0.5
    left_out = rng.choice([[], [name], ["c", name]])
    ahead = rng.choice([0, 1, 1])
    mine = rng.choice(["x", "y"])
    start = {P0: Cursor(rng.randint(0, 2))} if rng.random() < 0.5 else None
    until = rng.choice([None, now + timedelta(days=9000), now])
    changes = {"url": f"https://{rng.randint(0, 1)}.example", "parked_max": rng.randint(1, 6)}

    def claim_and_answer(s: DeliveryStore) -> object:
        rows = s.parked.claim(now, 3, 30, epoch, without=left_out)
        for row in rows[1:]:
            when = None if dead else now + timedelta(seconds=50)
            s.parked.reschedule(
                row, next_attempt_at=when, attempts=row.attempt + 1, reason="x", status=400, epoch=epoch
            )
        return rows

    calls: list[Callable[[DeliveryStore], object]] = [
        lambda s: s.settle_group(
            GroupWork(place, Cursor(at), Cursor(at + 1), group.members, group.version), outcomes, now, epoch
        ),
        lambda s: s.settle_subscription(name, place, behind, Cursor(behind.batch + ahead, through), single, now, epoch),
        lambda s: s.join(name, epoch),
        claim_and_answer,
        lambda s: s.retried(name, single, now, epoch),
        lambda s: s.parked.delivered([one], epoch),
        lambda s: s.parked.release([one], now, epoch),
        lambda s: s.parked.drop([one], epoch),
        lambda s: s.parked.expire(name, now - timedelta(minutes=4), now, epoch),
        lambda s: s.suspend(name, "rest", epoch),
        lambda s: s.resume(name, epoch),
        lambda s: s.register(specs, MadeBy.FILE, starts, epoch),
        lambda s: s.open_partition(SourcePartition("late", 0), 3, epoch),
        lambda s: s.add(spec(mine, parked_max=6, secrets=("s0",)), start, epoch),
        lambda s: s.change(name, changes, epoch),
        lambda s: s.rotate(mine, f"s{turn}", until, now, epoch),
        lambda s: s.retire(mine, epoch),
        lambda s: s.remove(name, epoch),
    ]
    return rng.choices(calls, weights=[12, 12, 4, 5, 4, 2, 1, 1, 1, 1, 2, 2, 1, 4, 2, 2, 1, 1])[0]


def test_subscriptions_that_others_changed_are_seen_at_the_next_look(state: State, take_over: TakeOver) -> None:
    """GIVEN a look that is kept WHEN another process adds, changes, removes or rotates THEN the next look shows it."""
    mine, theirs, epoch = PostgresDelivery(state), PostgresDelivery(state), take_over()
    begin(mine, epoch)

    def seen() -> dict[str, object]:
        assert mine.subscriptions() == PostgresDelivery(state).subscriptions()
        return {name: (one.spec.bundle, one.state, one.spec.secrets) for name, one in mine.subscriptions().items()}

    assert seen() == {}
    theirs.add(spec("a", secrets=("sealed:1",)), None, epoch)
    first = seen()
    theirs.change("a", {"bundle": 7}, epoch)
    changed = seen()
    theirs.suspend("a", "for now", epoch)
    paused = seen()
    theirs.rotate("a", "sealed:2", T0 + timedelta(days=10_000), T0, epoch)
    rotated = seen()
    theirs.remove("a", epoch)
    assert len({str(one) for one in (first, changed, paused, rotated, seen())}) == 5


def test_a_reset_waits_for_a_shard_that_settles_just_now(state: State) -> None:
    """GIVEN a settlement under way in another shard WHEN a partition is reset THEN its cursors are lowered after that:
    the settlement would put them up again, over batches that are made anew.
    """
    take = owners(PostgresLeases(state, is_gone=lambda holder: True))
    store, epoch = PostgresDelivery(state), take(DELIVER_LEASE)
    begin(store, epoch, "a")
    store.settle_group(GroupWork(P0, Cursor(0), Cursor(10), frozenset("a")), [done("a")], T0, epoch)
    store.spread(2, epoch)
    source_epoch = take(source_lease("shop"))
    with ThreadPoolExecutor(1) as pool, state.connection() as asking:
        with state.transaction() as settling:
            settling.execute(queries.LOCK_GROUP, (1,))
            stores, epochs = (state, PostgresCheckpoints(state)), {"source_epoch": source_epoch, "deliver_epoch": epoch}
            lowered = pool.submit(reset, *stores, "shop", 0, 5, **epochs)
            waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
            until(lambda: asking.execute(waiting).fetchone() == (1,) or lowered.done(), "the reset waits")
            assert not lowered.done()
            settling.execute("update cursors set batch = 11 where reader = '' and shard = 1 and partition = 0")
        assert lowered.result() == 2
    assert {group.cursors[P0] for group in store.groups().values()} == {Cursor(5)}


def test_d7_no_more_rows_expire_at_once_than_the_limit_by_any_plan(pg_server: PostgresServer) -> None:
    """GIVEN a server that plans nested loops, as it may when it has counted its rows WHEN rows expire THEN no more than
    the limit go at once: the list of rows with a limit is made once, and not anew for each row."""
    others = " ".join(f"-c enable_{way}=off" for way in ("hashjoin", "mergejoin", "hashagg", "material", "sort"))
    with fresh_state(make_conninfo(pg_server.socket_dsn(), options=others)) as state:
        store = PostgresDelivery(state)
        epoch = _taker(PostgresLeases(state, is_gone=lambda _: True))()
        begin(store, epoch, "a", "b")
        outcomes = [done("a", *(event(n) for n in (1, 2, 3))), done("b")]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), frozenset("ab")), outcomes, T0, epoch)
        later = T0 + timedelta(days=9)
        assert [store.parked.expire("a", later, later, epoch, 2) for _ in range(3)] == [2, 1, 0]
