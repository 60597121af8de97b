"""This process as one of the instances of a deployment: it announces itself, and learns which leases it is to take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

from evermark.cluster.assignment import assigned
from evermark.cluster.base import Holder, LeaseRow, LeaseStore
from evermark.cluster.fence import deliver_lease, source_lease
from evermark.cluster.holding import LIMITS, LeaseLimits
from evermark.cluster.members import Member, Members, member_of
from evermark.errors import EvermarkError, known
from evermark.observe.logging import get_logger
from evermark.sources.base import Source
from evermark.state.connection import State

_LOOK_EVERY_S = 0.5
_LOOK_ALONE_S = 1.0
_SAID_MAX = 20  # leases that a line of the log names


def leases_of(sources: Mapping[str, Source], shards: Iterable[int]) -> frozenset[str]:
    """What instances share out of these: each is done by one of them at a time."""
    mine = {deliver_lease(shard) for shard in shards}
    for name, source in sources.items():
        mine |= {source_lease(name, partition) for partition in _divided(source)}
    return frozenset(mine)


def _divided(source: Source) -> Sequence[int]:
    """If the source does not say which partitions it has, the first partition stands for all."""
    try:
        return source.partitions() if source.divisible() else [0]
    except Exception:  # noqa: BLE001 - said by the reading itself
        return [0]


def share_of(name: str, members: Mapping[str, Member], rows: Iterable[LeaseRow]) -> frozenset[str]:
    """The leases that an instance is to take; none while it is drained. It lives, whatever its row says.

    A lease that was let go of counts as its last owner's: a lane that is renewed is about to take it again.
    """
    living = [member for member in members.values() if member.lives or member.name == name]
    able = {member.name: member.leases for member in living if not member.draining}
    owners = {row.name: member_of(owner) for row in rows if (owner := _owner(row)) is not None}
    return frozenset(lease for lease, instance in assigned(able, owners).items() if instance == name)


def _owner(row: LeaseRow) -> str | None:
    """The holder says which instance has a lease; rows of older programs do not say which instance had it last."""
    if row.holder is None:
        return row.last
    return row.holder.instance if row.held else None


def left_by_all(leases: Collection[str], members: Mapping[str, Member]) -> frozenset[str]:
    """The leases that no instance is to take: each that could is drained, or does not live."""
    taken = [member.leases for member in members.values() if member.lives and not member.draining]
    return frozenset(leases) - frozenset().union(*taken)


class Membership:
    """One thread, until stopped. While State does not answer, the share stays as it was; where it is not known, it is
    all: leases are asked for then, and say why there are none.
    """

    def __init__(self, state: State, leases: LeaseStore, holder: Holder, limits: LeaseLimits = LIMITS) -> None:
        self._store, self._holder, self._limits = leases, holder, limits
        self._leases: frozenset[str] = frozenset()  # that it can take just now
        self._members = Members(state, ttl_s=limits.ttl_s)
        self.name = holder.instance
        self.share: frozenset[str] | None = None  # not known yet
        self._can_take = True  # whether the store of leases answers here
        self._found: frozenset[str] = frozenset()  # the share by the last look
        self._others = 0  # instances that live
        self._on_share: Callable[[frozenset[str] | None], None] = lambda _: None
        self.on_seen: Callable[[], None] = lambda: None  # told when the others were looked at
        self.on_left: Callable[[frozenset[str]], None] = lambda _: None  # told which leases no instance is to take
        self._lock = threading.Lock()
        self._looking = threading.RLock()
        self._stopping = threading.Event()
        self._log = get_logger(part="instance", instance=self.name)
        self._said: str | None = None
        self._drained = False
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def start(self) -> None:
        self._beat()
        self._thread.start()

    def able(self, leases: frozenset[str]) -> None:
        """This instance can take these leases now, and no others. The others hear of it, and it learns its share, at
        once: a part that is begun after this does not stand by first.
        """
        with self._looking:
            if leases != self._leases:
                self._leases = leases
                self._beat()
                if not self._look():
                    self._tell_share(None)

    def tell(self, on_share: Callable[[frozenset[str] | None], None]) -> None:
        """`on_share` is told of the share, now and whenever it changes."""
        with self._lock:
            self._on_share = on_share
            on_share(self.share)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(self._limits.ttl_s)
        try:
            self._members.leave(self._holder)
        except EvermarkError as error:
            self._log.debug("the instance could not say that it ends; the others see it", error=error)

    def _run(self) -> None:
        beaten_at = time.monotonic()
        while not self._stopping.wait(_LOOK_EVERY_S if self._others else _LOOK_ALONE_S):
            with self._looking:
                if time.monotonic() - beaten_at >= self._limits.renew_every_s and self._beat():
                    beaten_at = time.monotonic()
                self._look()

    def _beat(self) -> bool:
        return self._tried(lambda: self._say_alive(self._can_take))

    def _say_alive(self, can_take: bool) -> None:
        self._members.beat(self._holder, version("evermark"), self._leases if can_take else ())

    def _look(self) -> bool:
        return self._tried(self._share_out)

    def _share_out(self) -> None:
        members = self._members.all()
        if self.name not in members:  # the others forgot it while it was silent
            self._say_alive(self._can_take)
            if self._drained:
                self._members.drain(self.name)
            members = self._members.all()
        me = members[self.name]
        if me.draining and not self._drained:
            self._drained = True
            self._log.info("this instance is drained: everything is handed over")
        if self._drained:
            self.on_left(left_by_all(self._leases, members))
        rows = self._rows()
        # From here on it can take its leases, whatever the row said that was read before.
        members[self.name] = replace(me, leases=self._leases)
        found = share_of(self.name, members, rows)
        self.on_seen()
        self._others = sum(member.lives for name, member in members.items() if name != self.name)
        # What is to be handed over is kept for one more look: by then the others know, and wait for it.
        share = found | ((self.share or frozenset()) & self._found)
        self._found = found
        self._tell_share(share)

    def _rows(self) -> Collection[LeaseRow]:
        """Where leases are not in State, they may be out of reach for this instance alone: the others hear of it, and
        leave it nothing.
        """
        try:
            rows = self._store.rows()
        except EvermarkError:
            self._say_whether_it_can_take(False)
            raise
        self._say_whether_it_can_take(True)
        return rows.values()

    def _say_whether_it_can_take(self, can_take: bool) -> None:
        if can_take != self._can_take:
            self._say_alive(can_take)
            self._can_take = can_take  # not before the others can hear of it: else it is never said again

    def _tell_share(self, share: frozenset[str] | None) -> None:
        with self._lock:
            if share != self.share:
                if share is not None:
                    said = {"leases": sorted(share)[:_SAID_MAX], "count": len(share), "of": len(self._leases)}
                    self._log.info("share of the work", **said, other_instances=self._others)
                self._on_share(share)
                self.share = share  # not before: a share that could not be told is told at the next look

    def _tried(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except Exception as found:  # noqa: BLE001 - without this thread nobody would hear of this instance any more
            error = known(found)
            if error.message != self._said:
                self._log.warning("the instances cannot be looked at; what is owned stays so", error=error)
            self._said = error.message
            return False
        self._said = None
        return True
