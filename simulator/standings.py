"""What is on record of each subscription: who may change it, and what failures of its endpoint must lead to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from evermark.delivery.decide.retry import ENDPOINT_BACKOFF_S_MAX
from evermark.delivery.model import Fate, Outcome, Subscription, SubscriptionState
from simulator.broken import require
from simulator.promises import who

SUSPEND_AFTER = 4  # instead of 10: seeds are short

_ABOUT_ONE = frozenset({"settle_subscription", "retried", "join", "suspend", "resume", "disable"})


class Standings:
    """Compares what is on record before and after each write, and counts failures by itself."""

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._seen: Mapping[str, Subscription] = {}
        self._failures: Counter[str] = Counter()
        self._not_before: dict[str, datetime] = {}

    def after(
        self, method: str, args: tuple[Any, ...], known: Mapping[str, Subscription], generation: int | None
    ) -> None:
        before = {name: was for name, was in self._seen.items() if name in known and _is_same(was, known[name])}
        self._seen = known
        if method == "retried" and args[0] in before and generation != before[args[0]].generation:
            method = "retried for a former one"
        for name in before.keys() - self._touched(method, args, before):
            was, now = _record(before[name]), _record(known[name])
            require(was == now, f"{method} made {now} of {name}, which was {was}: it has nothing to do with that")
        if method == "settle_subscription":
            self._settled(before[args[0]], known[args[0]], args[4], args[5])
        elif method == "retried" and args[0] in before:
            self._retried(before[args[0]], known[args[0]], args[1], args[2])
        elif method == "settle_group":
            for outcome in args[1]:
                if outcome.subscription in before:
                    self._settled_in_group(before[outcome.subscription], known[outcome.subscription], outcome, args[2])
        elif (method == "resume" and before[args[0]].state is not SubscriptionState.LIVE) or (
            method == "change" and "url" in args[1]
        ):
            self._forgive(who(known[args[0]].spec))

    def look_at_due(self, due: Iterable[Subscription]) -> None:
        """These are about to be worked for."""
        for one in due:
            require(
                one.state is SubscriptionState.BEHIND
                or (one.state is SubscriptionState.SUSPENDED and one.next_attempt_at is not None),
                f"{one.name} is worked for, and is {one.state}: {one.reason}",
            )
            not_before = self._not_before.get(who(one.spec))
            require(
                not_before is None or not_before <= self._clock(),
                f"{one.name} failed {self._failures[who(one.spec)]} times in a row; tried again before {not_before}",
            )

    def _touched(self, method: str, args: tuple[Any, ...], before: dict[str, Subscription]) -> set[str]:
        """Whose record this may change."""
        if method in ("settle_group", "spread"):
            return {name for name, was in before.items() if was.state is SubscriptionState.LIVE}
        if method in _ABOUT_ONE or (method == "change" and "url" in args[1]):
            return {args[0]}
        return set()

    def _settled(self, was: Subscription, now: Subscription, outcome: Outcome, at: datetime) -> None:
        one, untouchable = who(now.spec), _needs_person(was)
        if outcome.fate is Fate.GONE:
            require(now.state is SubscriptionState.DISABLED, f"{one} is gone, and {now.state}")
        elif outcome.fate is Fate.ENDPOINT_FAILED and not untouchable:
            self._fail(one, was, now, at)
        elif outcome.fate is Fate.STUCK:
            said = f"{one} could not read the log: {now.failures} failures, after {was.failures}, {now.state}"
            require((now.failures, was.state is now.state) == (was.failures, True), said)
        elif outcome.fate is Fate.FULL and not untouchable:
            self._full(one, now, outcome)
        elif outcome.fate is Fate.DONE and _is_full(now) and not untouchable:
            self._full(one, now, outcome)  # there was no room for what it held back, whether it was asked or not
        elif outcome.fate is Fate.DONE and not untouchable and _is_answered(outcome):
            require(now.failures == 0, f"{one} took an event, and {now.failures} failures are still on record")
            self._forgive(one)

    def _retried(self, was: Subscription, now: Subscription, outcome: Outcome, at: datetime) -> None:
        """A failure that somebody else found meanwhile counts once; one that is full is not brought back by this."""
        backs_off = was.failures > 0 and was.next_attempt_at is not None and was.next_attempt_at > at
        full = was.state is SubscriptionState.SUSPENDED and was.failures == 0
        if (outcome.fate is Fate.ENDPOINT_FAILED and backs_off) or (outcome.fate is Fate.DONE and full):
            require(_record(was) == _record(now), f"{was.name}: retries made {_record(now)} of {_record(was)}")
        else:
            self._settled(was, now, outcome, at)

    def _settled_in_group(self, was: Subscription, now: Subscription, outcome: Outcome, at: datetime) -> None:
        """Whoever joined meanwhile just leaves: what is said of its former self changes nothing."""
        left = now.state is SubscriptionState.BEHIND and now.failures == was.failures
        told = now.failures > was.failures or outcome.fate is Fate.DONE
        if was.state is SubscriptionState.LIVE and told and not left:
            self._settled(was, now, outcome, at)

    def _fail(self, one: str, was: Subscription, now: Subscription, at: datetime) -> None:
        self._failures[one] += 1
        count = self._failures[one]
        require(now.failures == count, f"{one} failed {count} times in a row; on record are {now.failures}")
        suspended = count >= SUSPEND_AFTER or was.state is SubscriptionState.SUSPENDED
        wanted = SubscriptionState.SUSPENDED if suspended else SubscriptionState.BEHIND
        require(now.state is wanted, f"{one} failed {count} times in a row, and is {now.state}")
        wait_s = min(ENDPOINT_BACKOFF_S_MAX, 2.0 ** (count - 1))
        self._not_before[one] = at + timedelta(seconds=wait_s)

    def _full(self, one: str, now: Subscription, outcome: Outcome) -> None:
        """No failure; but where nothing was asked, the failures before it are not forgotten."""
        count = 0 if _is_answered(outcome) else self._failures[one]
        found = (now.state, now.failures)
        require(found == (SubscriptionState.SUSPENDED, count), f"{one} is full, failed {count} times before: {found}")
        if not count:
            self._forgive(one)

    def _forgive(self, one: str) -> None:
        self._failures.pop(one, None)
        self._not_before.pop(one, None)


def _is_same(one: Subscription, other: Subscription) -> bool:
    return one.generation == other.generation


def _record(one: Subscription) -> tuple[SubscriptionState, int, datetime | None]:
    return one.state, one.failures, one.next_attempt_at


def _needs_person(one: Subscription) -> bool:
    paused = one.state is SubscriptionState.SUSPENDED and one.next_attempt_at is None
    return paused or one.state is SubscriptionState.DISABLED


def _is_full(one: Subscription) -> bool:
    return one.state is SubscriptionState.SUSPENDED and one.failures == 0 and one.next_attempt_at is not None


def _is_answered(outcome: Outcome) -> bool:
    return outcome.accepted > 0 or any(event.status is not None for event in outcome.parked)
