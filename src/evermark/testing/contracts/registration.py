"""What every `DeliveryStore` promises about subscriptions that are made, changed and removed one by one."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from evermark.delivery.decide.registration import secret_ends
from evermark.delivery.limits import SECRETS_MAX
from evermark.delivery.model import Cursor, Fate, GroupWork, MadeBy, Outcome, SubscriptionState
from evermark.delivery.ports import DeliveryStore
from evermark.errors import ConfigError, ConflictError, NotFoundError
from evermark.testing.contracts.owned import OwnedStore
from evermark.testing.contracts.scene import P0, P1, T0, begin, done, event, failed, snapshot, spec


class RegistrationContract(OwnedStore):
    def test_one_added_from_now_is_in_the_group(self, store: DeliveryStore, epoch: int) -> None:
        """It joins where the group stands, under a new version, and everybody else stays as they are."""
        begin(store, epoch, "a")
        before, others = store.group(), store.subscriptions()
        store.add(spec("new", bundle=3, secrets=("sealed:1",)), None, epoch)
        made = store.subscription("new")
        assert (made.state, made.spec.made_by, made.spec.bundle) == (SubscriptionState.LIVE, MadeBy.API, 3)
        assert store.subscriptions() == {**others, "new": made}
        after = store.group()
        assert (after.members, after.version) == (before.members | {"new"}, before.version + 1)
        assert after.cursors == before.cursors and store.cursors("new") == {}

    def test_one_added_from_before_begins_behind(self, store: DeliveryStore, epoch: int) -> None:
        """At the cursors it was given; what nobody gave a cursor for is all backlog. The group is not touched."""
        begin(store, epoch, "a")
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(5), frozenset("a")), [done("a")], T0, epoch)
        before = store.group()
        store.add(spec("old"), {P0: Cursor(2)}, epoch)
        assert store.subscription("old").state is SubscriptionState.BEHIND
        assert store.cursors("old") == {P0: Cursor(2), P1: Cursor(0)}
        assert store.group() == before

    def test_added_in_mid_work_it_misses_nothing(self, store: DeliveryStore, epoch: int) -> None:
        """A batch that was under way did not reach it: it owes that batch, and all after it."""
        begin(store, epoch, "a")
        work = store.group()
        store.add(spec("new"), None, epoch)
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), work.members, work.version), [done("a")], T0, epoch)
        after = store.group()
        assert after.members == {"a"}
        assert (store.subscription("new").state, store.cursors("new")) == ("behind", {P0: Cursor(0), P1: Cursor(0)})

    def test_a_name_is_given_once_whoever_gives_it(self, store: DeliveryStore, epoch: int) -> None:
        """Neither takes the other's name, nor its own twice; a refusal leaves nothing behind."""
        begin(store, epoch, "file")
        store.add(spec("api"), None, epoch)
        before = snapshot(store)
        for name in ("file", "api"):
            with pytest.raises(ConflictError):
                store.add(spec(name, url="https://other.example"), {P0: Cursor(0)}, epoch)
        for wrong in (spec(""), spec("x" * 300), spec("n\x00"), spec("open", allow_networks=("10.0.0.0/8",))):
            with pytest.raises(ConfigError):
                store.add(wrong, None, epoch)
        with pytest.raises(ConfigError):
            store.register([spec("file"), spec("api")], MadeBy.FILE, {}, epoch)
        assert snapshot(store) == before

    def test_what_the_file_made_is_changed_in_the_file(self, store: DeliveryStore, epoch: int) -> None:
        """No call for one subscription touches it; nor one that is not there."""
        begin(store, epoch, "file")
        before = snapshot(store)
        for name, error in (("file", ConflictError), ("nobody", NotFoundError)):
            with pytest.raises(error):
                store.change(name, {"bundle": 2}, epoch)
            with pytest.raises(error):
                store.rotate(name, "sealed:2", None, T0, epoch)
            with pytest.raises(error):
                store.retire(name, epoch)
            with pytest.raises(error):
                store.remove(name, epoch)
        with pytest.raises(NotFoundError):
            store.subscription("nobody")
        assert snapshot(store) == before

    def test_the_file_does_not_touch_what_the_api_made(self, store: DeliveryStore, epoch: int) -> None:
        """A start with another file, or with none, leaves them with their cursors and parked rows."""
        begin(store, epoch, "a")
        store.add(spec("live"), None, epoch)
        store.add(spec("old"), {P0: Cursor(0)}, epoch)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset({"a", "live"})),
            [done("a"), done("live", event(1))],
            T0,
            epoch,
        )
        mine = {name: found for name, found in store.subscriptions().items() if name != "a"}
        store.register([], MadeBy.FILE, {}, epoch)
        assert store.subscriptions() == mine
        assert store.cursors("old") == {P0: Cursor(0), P1: Cursor(0)}
        assert set(store.parked.counts()) == {"live"}

    def test_a_change_keeps_state_and_cursor(self, store: DeliveryStore, epoch: int) -> None:
        """Only what was named changes, in the group and behind; membership stays, and so does the version."""
        begin(store, epoch)
        store.add(spec("live", where="data.n = 1", headers={"x": "1"}), None, epoch)
        store.add(spec("old"), {P0: Cursor(0)}, epoch)
        store.settle_subscription("old", P0, Cursor(0), Cursor(1), failed("old"), T0, epoch)
        before, group = store.subscriptions(), store.group()
        for name in before:
            store.change(name, {"bundle": 7, "where": None, "ops": ("insert",), "headers": {"y": "2"}}, epoch)
            was = before[name]
            wanted = replace(was.spec, bundle=7, where=None, ops=("insert",), headers={"y": "2"})
            assert store.subscription(name) == replace(was, spec=wanted)
        assert (store.group(), store.cursors("old")) == (group, {P0: Cursor(0), P1: Cursor(0)})
        for fixed in ("name", "start", "secrets", "allow_networks", "made_by", "nonsense"):
            with pytest.raises(ConfigError):
                store.change("live", {fixed: "x"}, epoch)

    def test_a_new_url_says_nothing_of_the_old_one(self, store: DeliveryStore, epoch: int) -> None:
        """One that was gone or failing goes on where it stopped; a member stays a member, a pause stays a pause."""
        begin(store, epoch)
        for name in ("gone", "well", "paused"):
            store.add(spec(name), None, epoch)
        outcomes = [Outcome("gone", Fate.GONE), done("well"), done("paused")]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), store.group().members), outcomes, T0, epoch)
        store.suspend("paused", "rest", epoch)
        store.change("gone", {"bundle": 2}, epoch)
        assert store.subscription("gone").state is SubscriptionState.DISABLED
        for name in ("gone", "well", "paused"):
            store.change(name, {"url": "https://new.example"}, epoch)
        states = {name: found.state.value for name, found in store.subscriptions().items()}
        assert states == {"gone": "behind", "well": "live", "paused": "suspended"}
        assert store.cursors("gone") == {P0: Cursor(0), P1: Cursor(0)}

    def test_what_is_removed_goes_with_all_it_had(self, store: DeliveryStore, epoch: int) -> None:
        """Cursors, parked rows, membership; one made anew under its name begins with nothing of it."""
        begin(store, epoch, "a")
        store.add(spec("live"), None, epoch)
        store.add(spec("old"), {P0: Cursor(0)}, epoch)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), frozenset({"a", "live"})),
            [done("a"), done("live", event(1))],
            T0,
            epoch,
        )
        version, generation = store.group().version, store.subscription("live").generation
        store.remove("old", epoch)
        assert store.group().version == version
        store.remove("live", epoch)
        assert set(store.subscriptions()) == {"a"}
        assert store.group().members == {"a"} and store.group().version == version + 1
        assert store.cursors("old") == {} and store.parked.counts() == {}
        store.add(spec("live"), None, epoch)
        assert store.subscription("live").generation != generation

    def test_removed_and_made_anew_in_mid_work_misses_nothing(self, store: DeliveryStore, epoch: int) -> None:
        """What its former self accepted does not count for the new one."""
        begin(store, epoch, "a")
        store.add(spec("b"), None, epoch)
        work = store.group()
        store.remove("b", epoch)
        store.add(spec("b"), None, epoch)
        store.settle_group(
            GroupWork(P0, Cursor(0), Cursor(1), work.members, work.version), [done("a"), done("b")], T0, epoch
        )
        after = store.group()
        assert after.members == {"a"}
        assert store.cursors("b")[P0].batch == 0

    def test_old_and_new_secret_sign_until_the_overlap_ends(self, store: DeliveryStore, epoch: int) -> None:
        """The new one first; without an end the old one stays until it is retired."""
        begin(store, epoch)
        store.add(spec("a", secrets=("sealed:1",)), None, epoch)
        store.rotate("a", "sealed:2", None, T0, epoch)
        assert store.subscription("a").spec.secrets == ("sealed:2", "sealed:1")
        store.retire("a", epoch)
        assert store.subscriptions()["a"].spec.secrets == ("sealed:2",)

    def test_an_expired_secret_signs_nothing(self, store: DeliveryStore, epoch: int) -> None:
        """Whoever reads the subscription after that time does not get it; before it, both, with the end told."""
        now = datetime.now(UTC)
        begin(store, epoch)
        store.add(spec("a", secrets=("sealed:1",)), None, epoch)
        ends = now + timedelta(hours=1)
        store.rotate("a", "sealed:2", ends, now, epoch)
        both = store.subscription("a").spec
        assert both.secrets == ("sealed:2", "sealed:1") and secret_ends(both) == [None, ends]
        store.rotate("a", "sealed:3", now - timedelta(seconds=1), now - timedelta(hours=2), epoch)
        assert store.subscription("a").spec.secrets == ("sealed:3",)
        assert store.subscriptions()["a"].spec.secrets == ("sealed:3",)

    def test_secrets_are_limited_in_number(self, store: DeliveryStore, epoch: int) -> None:
        """At the limit a rotation is refused: no secret that is still good is dropped for another."""
        begin(store, epoch)
        store.add(spec("a", secrets=("sealed:0",)), None, epoch)
        for number in range(1, SECRETS_MAX):
            store.rotate("a", f"sealed:{number}", None, T0, epoch)
        before = snapshot(store)
        with pytest.raises(ConflictError):
            store.rotate("a", "sealed:x", None, T0, epoch)
        assert snapshot(store) == before

    def test_a_page_of_parked_rows_may_be_of_the_dead_alone(self, store: DeliveryStore, epoch: int) -> None:
        """Dead, waiting or both, of one subscription or all, page by page."""
        begin(store, epoch, "a", "b")
        outcomes = [done("a", event(1), event(2), event(3)), done("b", event(1))]
        store.settle_group(GroupWork(P0, Cursor(0), Cursor(3), frozenset("ab")), outcomes, T0, epoch)
        for row in store.parked.claim(T0 + timedelta(minutes=1), 2, 30, epoch):
            store.parked.reschedule(row, next_attempt_at=None, attempts=8, reason="", status=400, epoch=epoch)
        everything = store.parked.rows()
        dead = [row for row in everything if row.next_attempt_at is None]
        assert len(dead) == 2
        assert store.parked.rows(dead=True) == dead
        assert store.parked.rows(dead=False) == [row for row in everything if row not in dead]
        assert store.parked.rows(dead=True, after_id=dead[0].id) == dead[1:]
        assert store.parked.rows("a", dead=True, limit=1) == [row for row in dead if row.subscription == "a"][:1]
