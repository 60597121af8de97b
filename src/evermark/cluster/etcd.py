"""Leases in etcd, by its clock. State knows the epochs: the fence of every write reads them there.

Of each lease etcd has `<prefix>epochs/<name>`, which stays: a counter, and its holder; and `<prefix>held/<name>`, which
etcd itself removes when its time is over (docs/formats.md). A new owner raises the counter by a compare-and-set, and
writes its epoch into State, before it has the lease: from then on the former owner is refused. An owner lets go in
State first: when another can have the lease, nothing is written under the old epoch any more.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from evermark.cluster import liveness
from evermark.cluster.base import Holder, Lease, LeaseRow
from evermark.cluster.fence import stale
from evermark.cluster.liveness import Held, IsGone, epoch_for
from evermark.cluster.postgres import (
    epochs_noted,
    lease_rows,
    locked,
    note_checked,
    note_holder,
    note_parts,
    parts_missing,
    released,
    require,
)
from evermark.errors import EvermarkError, FormatError, StaleError
from evermark.etcd.claim import Claim
from evermark.etcd.client import EtcdClient, end_of, in_base64
from evermark.state.connection import State
from evermark.state.identity import identity_of

VERSION = 1
_LEASES_MAX = 100_000
_TRIES = 3
_AT_ONCE = 50  # leases: etcd takes 128 steps in a transaction
_DIVIDING_S = 10.0
_NOW = datetime(2000, 1, 1, tzinfo=UTC)  # what etcd still has is good for longer, what it has not is over


@dataclass(frozen=True)
class _Seen:
    """A lease as etcd has it. A revision of 0: there is no such key."""

    epoch: int = 0
    holder: Holder | None = None
    revision: int = 0  # of the counter
    held_revision: int = 0
    grant: int = 0  # etcd's own lease, by whose clock it runs
    runs: bool = False  # its time is not over

    @property
    def held(self) -> Held:
        return Held(self.holder, self.epoch, datetime.max.replace(tzinfo=UTC) if self.runs else _NOW)


class EtcdLeases:
    """A `LeaseStore`."""

    def __init__(self, etcd: EtcdClient, prefix: str, state: State, *, is_gone: IsGone = liveness.is_gone) -> None:
        self._etcd, self._state, self._is_gone = etcd, state, is_gone
        self._epochs, self._held = f"{prefix}epochs/", f"{prefix}held/"
        self._claim = Claim(etcd, prefix, lambda: identity_of(state))
        self._mine: dict[Lease, _Seen] = {}  # as we left them: most renewals need no look before

    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        seen = self._look([name])[name]
        lease = Lease(name, seen.epoch)
        if seen.holder == holder and self._is_noted(lease):
            try:
                self.renew([lease], ttl_s)
            except StaleError:
                return None
            return lease
        found = self.acquire_all([name], holder, ttl_s)
        return found[0] if found else None

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        for _ in range(_TRIES):
            seen = self._look(names)
            free = [name for name in names if self._is_free(seen[name], holder)]
            if not free:
                return []
            # State may be ahead: leases were kept there before, or this etcd began anew.
            with self._state.connection() as conn:
                noted = epochs_noted(conn, free)
            epoch = 1 + max(max(seen[name].epoch, noted.get(name, 0)) for name in free)
            taken = self._taken({name: seen[name] for name in free}, holder, epoch, ttl_s)
            if taken:
                return self._noted(taken, holder, ttl_s)
        return []

    def _taken(self, free: dict[str, _Seen], holder: Holder, epoch: int, ttl_s: float) -> list[Lease]:
        grant, found = self._grant(ttl_s), []
        for names in _some(list(free)):
            compare = [each for name in names for each in self._unchanged(name, free[name])]
            puts = [each for name in names for each in self._puts(name, epoch, holder, grant)]
            answer = self._etcd.transaction("taking leases", compare, puts)
            if answer.get("succeeded"):
                now = int(answer["header"]["revision"])
                mine = _Seen(epoch, holder, now, now, grant, runs=True)
                self._mine.update((Lease(name, epoch), mine) for name in names)
                found += [Lease(name, epoch) for name in names]
        return found

    def _noted(self, taken: Sequence[Lease], holder: Holder, ttl_s: float) -> list[Lease]:
        """The leases that are ours by State, too: before that, its fence refuses our writes."""
        try:
            with self._state.transaction() as conn:
                ours = {lease for lease in sorted(taken, key=_name) if note_holder(conn, lease, holder, ttl_s)}
        except BaseException:
            self._try_to_drop(taken)
            raise
        self._try_to_drop([lease for lease in taken if lease not in ours])  # one with a higher epoch was quicker
        return [lease for lease in taken if lease in ours]

    def free(self, names: Sequence[str], holder: Holder) -> list[str]:
        seen = self._look(names)
        return [name for name in names if self._is_free(seen[name], holder)]

    def divide(self, first: str, others: Sequence[str], holder: Holder) -> bool:
        with self._state.connection() as conn:
            missing = parts_missing(conn, others)
        if not missing:
            return True
        is_divided = len(missing) < len(others)
        taken: list[Lease] = []
        if not is_divided:
            taken = self.acquire_all([first], holder, _DIVIDING_S)
            if not taken:
                return False
        with self._state.transaction() as conn:
            # The holder of the lease for all of them can write to none of them.
            note_parts(conn, missing, locked(conn, first).epoch + 1)
        self.release(*taken)
        return True

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        """State is asked first: an owner that cannot write there is to lose what others could work with."""
        with self._state.connection() as conn:
            require(conn, leases)
        for some in _some(list(leases)):
            unknown = [lease for lease in some if lease not in self._mine]
            if unknown:
                seen = self._look([lease.name for lease in unknown])
                self._mine.update((lease, seen[lease.name]) for lease in unknown)
            mine = {lease: self._mine[lease] for lease in some}
            for lease, known in mine.items():
                if not _has(known, lease):
                    self._mine.pop(lease)
                    raise stale(lease.name, lease.epoch)
            self._renew(mine, ttl_s)
        return 0.0

    def _renew(self, mine: dict[Lease, _Seen], ttl_s: float) -> None:
        puts = []
        if not all(grant and self._keep(grant) for grant in sorted({seen.grant for seen in mine.values()})):
            grant = self._grant(ttl_s)  # its time was over, and nobody took it: running out is no loss by itself
            puts = [self._put_held(lease, grant) for lease in mine]
            mine = {lease: replace(seen, grant=grant) for lease, seen in mine.items()}
        compare = [each for lease, seen in mine.items() for each in self._still(lease, seen)]
        answer = self._etcd.transaction("renewing leases", compare, puts)
        if answer.get("succeeded"):
            self._mine.update(mine)
            return
        seen = self._look([lease.name for lease in mine])
        for lease in mine:
            self._mine.pop(lease, None)
        lost = [lease for lease, known in mine.items() if not _has(seen[lease.name], lease, known.holder)]
        raise stale(*_told(lost[0] if lost else next(iter(mine))))

    def release(self, *leases: Lease) -> None:
        with self._state.transaction() as conn:
            released(conn, leases)
        self._drop(leases)

    def require(self, lease: Lease) -> None:
        with self._state.connection() as conn:
            require(conn, [lease])

    def note_checked(self, leases: Sequence[Lease]) -> None:
        note_checked(self._state, leases)

    def rows(self) -> dict[str, LeaseRow]:
        """State says whose they are, etcd whether their time is over; when it will be, only etcd knows."""
        self._claim.require()
        asked = {"key": _key(self._held), "range_end": _key(end_of(self._held)), "limit": _LEASES_MAX}
        found = self._etcd.post("listing leases", "/kv/range", asked).get("kvs", ())
        runs = {_text(each["key"]).removeprefix(self._held): _text(each["value"]) for each in found}
        rows = lease_rows(self._state, is_gone=lambda _: False)
        return {name: self._row(row, runs.get(name)) for name, row in rows.items()}

    def _row(self, row: LeaseRow, runs: str | None) -> LeaseRow:
        held = row.holder is not None and runs == str(row.epoch) and not self._is_gone(row.holder)
        return replace(row, held=held, expires_at=None)

    def _is_noted(self, lease: Lease) -> bool:
        try:
            self.require(lease)
        except StaleError:
            return False
        return True

    def _is_free(self, seen: _Seen, holder: Holder) -> bool:
        return epoch_for(seen.held, holder, _NOW, self._is_gone) is not None

    def _look(self, names: Sequence[str]) -> dict[str, _Seen]:
        self._claim.require()
        found: dict[str, _Seen] = {}
        for some in _some(list(names)):
            keys = [f"{place}{name}" for place in (self._epochs, self._held) for name in some]
            gets = [{"request_range": {"key": _key(key)}} for key in keys]
            answers = self._etcd.transaction("looking at leases", (), gets)["responses"]
            kvs = [(each["response_range"].get("kvs") or [None])[0] for each in answers]
            pairs = zip(some, kvs[: len(some)], kvs[len(some) :], strict=True)
            found.update((name, _seen(name, counter, held)) for name, counter, held in pairs)
        return found

    def _unchanged(self, name: str, seen: _Seen) -> list[Any]:
        return [_is_at(f"{self._epochs}{name}", seen.revision), _is_at(f"{self._held}{name}", seen.held_revision)]

    def _still(self, lease: Lease, seen: _Seen) -> list[Any]:
        """By its value, too: an etcd that lost everything counts its revisions from 1 again."""
        key, value = f"{self._epochs}{lease.name}", _key(_counter(seen.epoch, seen.holder))
        return [
            _is_at(key, seen.revision),
            {"key": _key(key), "result": "EQUAL", "target": "VALUE", "value": value},
        ]

    def _puts(self, name: str, epoch: int, holder: Holder | None, grant: int) -> list[Any]:
        put = {"request_put": {"key": _key(f"{self._epochs}{name}"), "value": _key(_counter(epoch, holder))}}
        if holder is None:
            return [put, {"request_delete_range": {"key": _key(f"{self._held}{name}")}}]
        return [put, self._put_held(Lease(name, epoch), grant)]

    def _put_held(self, lease: Lease, grant: int) -> Any:
        key, value = _key(f"{self._held}{lease.name}"), _key(str(lease.epoch))
        return {"request_put": {"key": key, "value": value, "lease": str(grant)}}

    def _grant(self, ttl_s: float) -> int:
        granted = self._etcd.post("beginning a lease", "/lease/grant", {"TTL": str(math.ceil(ttl_s)), "ID": "0"})
        return int(granted["ID"])

    def _keep(self, grant: int) -> bool:
        """Whether its time was not over, and begins anew."""
        answer = self._etcd.post("renewing leases", "/lease/keepalive", {"ID": str(grant)})
        return int(answer["result"].get("TTL", 0)) > 0

    def _drop(self, leases: Sequence[Lease]) -> None:
        """All at one moment; where some of them are no longer ours, the others."""
        if not leases:
            return
        holders = {lease: self._mine.pop(lease, _Seen()).holder for lease in leases}
        seen = self._look([lease.name for lease in leases])
        ours = [lease for lease in leases if _has(seen[lease.name], lease, holders[lease])]
        for some in _some(ours):
            compare = [each for lease in some for each in self._still(lease, seen[lease.name])]
            puts = [each for lease in some for each in self._puts(lease.name, lease.epoch, None, 0)]
            self._etcd.transaction("releasing leases", compare, puts)

    def _try_to_drop(self, leases: Sequence[Lease]) -> None:
        try:
            self._drop(leases)
        except EvermarkError:
            return  # they run out by themselves


def _seen(name: str, counter: Any, held: Any) -> _Seen:
    if counter is None:
        return _Seen(held_revision=_revision(held))
    try:
        found = json.loads(_text(counter["value"]))
        if found["v"] == VERSION:
            epoch, holder = int(found["epoch"]), Holder(**found["holder"]) if found["holder"] else None
            runs = held is not None and _text(held["value"]) == str(epoch)
            grant = int(held.get("lease", 0)) if runs else 0
            return _Seen(epoch, holder, _revision(counter), _revision(held), grant, runs)
        said = f"version {str(found['v'])[:20]}"
    except (ValueError, KeyError, TypeError, AttributeError):
        said = "something else"
    raise FormatError(
        f"the lease {name} in etcd holds {said}; this program knows version {VERSION}",
        hint="is cluster.leases.etcd.prefix shared with another program?",
    )


def _counter(epoch: int, holder: Holder | None) -> str:
    return json.dumps({"v": VERSION, "epoch": epoch, "holder": vars(holder) if holder else None})


def _has(seen: _Seen, lease: Lease, holder: Holder | None = None) -> bool:
    """Whether somebody, or `holder`, has the lease under its epoch. Where etcd lost everything, two may have begun with
    one epoch: State let one of them write, and the other must not end what that one has.
    """
    return seen.holder is not None and seen.epoch == lease.epoch and holder in (None, seen.holder)


def _is_at(key: str, revision: int) -> Any:
    return {"key": _key(key), "result": "EQUAL", "target": "MOD", "mod_revision": str(revision)}


def _revision(kv: Any) -> int:
    return int(kv["mod_revision"]) if kv is not None else 0


def _key(text: str) -> str:
    return in_base64(text.encode())


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def _name(lease: Lease) -> str:
    return lease.name


def _told(lease: Lease) -> tuple[str, int]:
    return lease.name, lease.epoch


def _some(each: list[Any]) -> Iterator[list[Any]]:
    for at in range(0, len(each), _AT_ONCE):
        yield each[at : at + _AT_ONCE]
