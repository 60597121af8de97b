"""The ports as one instance sees them: each call is an effect, and each effect is a point where a fault may strike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from evermark.delivery.model import Cursor, CursorVector, SourcePartition
from evermark.delivery.replay.memory import MemoryReplays
from evermark.delivery.replay.plan import Target, TargetState
from evermark.delivery.store.memory import MemoryDelivery
from evermark.errors import ConflictError
from evermark.log.base import Append, Tail
from simulator.account import Account
from simulator.baton import Process
from simulator.broken import Broken
from simulator.source import SimLog, SimSource
from simulator.truth import Truth

# What is called once an effect has landed: the method and its arguments.
Landed = Callable[[str, tuple[Any, ...], dict[str, Any]], None]


class Effects(Protocol):
    moved: int

    def effect(self, process: Process, label: str, act: Callable[[], Any]) -> Any:
        """Carry out `act`, unless a fault strikes before it; a fault may strike after it, too."""


class Port:
    """Stands in for `target`; every method call on it is an effect."""

    def __init__(self, effects: Effects, process: Process, name: str, target: object, landed: Landed) -> None:
        self._made = (effects, process, name, target, landed)

    def __getattr__(self, method: str) -> Any:
        effects, process, name, target, landed = self._made
        bound = getattr(target, method)
        if not callable(bound):  # a part of the target
            part = Port(effects, process, name, bound, landed)
            setattr(self, method, part)
            return part
        label = f"{name}.{method}"
        if method in _NO_EFFECT:
            return bound

        def call(*args: Any, **kwargs: Any) -> Any:
            def act() -> Any:
                result = bound(*args, **kwargs)
                landed(method, args, kwargs)
                if label not in _STILL and method not in _READS and (result is None or result):
                    effects.moved += 1
                return result

            return effects.effect(process, label, act)

        setattr(self, method, call)
        return call


def nothing(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """For ports whose effects need no look."""


def log_landed(truth: Truth, log: SimLog) -> Landed:
    def landed(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "commit":
            append: Append = args[0]
            truth.after_commit(log.source, append.batch, append.partition, append.epoch)
        elif method == "sync":
            truth.after_sync(log.source)

    return landed


def source_landed(truth: Truth, source: SimSource) -> Landed:
    def landed(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "confirm":
            truth.after_confirm(source.name, *args)

    return landed


def feed_landed(truth: Truth, source: str, partition: int) -> Landed:
    def landed(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "confirm":
            truth.after_confirm(source, partition, *args)

    return landed


def heads_landed(truth: Truth) -> Landed:
    def landed(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "move":
            truth.after_head(*args)

    return landed


def checkpoints_landed(truth: Truth) -> Landed:
    def landed(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method == "save":
            truth.after_checkpoint(*args)

    return landed


_READS = frozenset(
    {
        "outside",
        "subscriptions",
        "subscription",
        "group",
        "groups",
        "cursors",
        "cursors_outside",
        "room",
        "counts",
        "oldest",
        "rows",
        "held_keys",
        "counted",
        "learned",
        "sessions_clear",
        "stopped",
        "surplus",
        "session_key",
        "session_keys",
        "load",
        "list",
        "tail",
        "files",
        "position_max",
        "ids_from",
        "latest",
        "next",
        "follow",
        "slices",
        "may_repeat_from",
        "check",
        "uncleared",
        "parked_now",
        "newest",
        "current",
        "past",
        "look",
        "slot",
        "floor",
        "sample",
    }
)
_STILL = frozenset(
    {"leases.acquire", "leases.acquire_all", "leases.renew", "leases.require", "leases.release", "replays.open"}
)
_NO_EFFECT = frozenset({"partitions", "repair"})  # answered without asking anybody


def delivery_landed(account: Account, lease: str) -> Landed:
    def landed(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if method not in _READS:
            account.after_write(method, args, kwargs, lease)

    return landed


class SimStore(MemoryDelivery):
    """`MemoryDelivery` that shows what was refused although nobody else was there."""

    def group_of(self, subscription: str) -> CursorVector:
        return self.tables.groups[self.tables.shard_at[subscription]].cursors

    def settle_subscription(
        self, subscription: str, place: SourcePartition, begun: Cursor, *rest: Any, **named: Any
    ) -> bool:
        try:
            return super().settle_subscription(subscription, place, begun, *rest, **named)
        except ConflictError as error:
            known = self.subscriptions().get(subscription)
            same = known is not None and named.get("generation") in (None, known.generation)
            if same and self.cursors(subscription).get(place) == begun:
                raise Broken(f"{subscription} could not settle, though nobody moved its cursor: {error}") from error
            raise


class SimReplayStore(MemoryReplays):
    """`MemoryReplays` that shows work that was done twice by one owner."""

    def settle(self, begun: Target, *rest: Any) -> Target:
        try:
            return super().settle(begun, *rest)
        except ConflictError as error:
            now = self._targets.get((begun.replay, begun.subscription))
            if now is not None and now.state is TargetState.RUNNING and now.mark != begun.mark:
                raise Broken(f"{begun.replay} was sent to {begun.subscription} twice at once: {error}") from error
            raise


class ForgetfulLog:
    """A log whose cleaning may have taken the note of its last batch: `end` is then unknown."""

    def __init__(self, log: SimLog, forgets: Callable[[], bool]) -> None:
        self._log = log
        self._forgets = forgets

    def fence(self, partition: int, epoch: int) -> Tail:
        tail = self._log.fence(partition, epoch)
        return Tail(tail.batch, tail.epoch, None) if self._forgets() else tail

    def fence_all(self, partitions: Sequence[int], epoch: int) -> dict[int, Tail]:
        return {partition: self.fence(partition, epoch) for partition in partitions}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)
