"""`evermark instance`: the running instances, and the leases each holds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import noun, say, show, warn
from evermark.cli.deployment import opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption
from evermark.cluster.base import Holder, LeaseRow, LeaseStore
from evermark.errors import BusyError, ConfigError, NotFoundError, UnreachableError

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.cluster.members import Member, Members

app = noun("Running Evermark processes.")
_POLL_S = 0.2
_WAIT_S = 120.0
_SAID_MAX = 20  # leases that a message names
_UNTAKEN_HINT = "`evermark instance list` says who has what; the log of the one that is to take it says why it does not"


@app.command("list")
def list_instances(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the instances that run, and the leases each holds."""
    with opened(config) as deployment:
        rows = _listed(_members(deployment).all(), deployment.leases.rows())
    columns = ("instance", "host", "pid", "state", "leases", "expires_at")
    show(rows, columns, as_json=as_json, empty="no instance runs; start one with: evermark up")


@app.command("drain")
def drain_instance(
    instance: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="May be left out when only one runs.")
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Have an instance hand over all its work.

    Waits until the others have it. The instance runs on without work, and may be stopped.
    """
    with opened(config) as deployment:
        members = _members(deployment)
        living = {name: member for name, member in members.all().items() if member.lives}
        name = _meant(sorted(living), instance)
        members.drain(name)
        taken = _wait_drained(deployment.leases, members, name, living[name].leases)
    done = "handed over everything" if taken else "let go of everything"
    say(f"{name} has {done}; stop it when you like, a new start takes its share again")


def _members(deployment: Deployment) -> Members:
    from evermark.cluster.members import Members

    return Members(deployment.state, ttl_s=deployment.lease_limits.ttl_s)


def _meant(living: list[str], asked: str | None) -> str:
    known = f"there are {', '.join(living)}" if living else "no instance runs"
    if asked is None:
        if len(living) != 1:
            raise ConfigError("which instance?", hint=f"{known}; name one: evermark instance drain NAME")
        return living[0]
    if asked not in living:
        raise NotFoundError(f"no running instance is called {asked[:80]!r}", hint=known)
    return asked


def _wait_drained(leases: LeaseStore, members: Members, name: str, able: Collection[str]) -> bool:
    """Until it holds nothing, and others hold what it held; whether they do. Warns, once, of work that nobody takes.

    The others are looked at again and again: one that was to take the work may be drained, too, or end.
    """
    from evermark.app.member import left_by_all

    deadline = time.monotonic() + _WAIT_S
    held, given, warned = frozenset[str](), set[str](), False
    while True:
        rows = _rows(leases, deadline)
        before, held = held, frozenset(row.name for row in _held(rows).get(name, ()))
        given |= before - held
        left = left_by_all({*able, *held, *given}, members.all())
        if left and not warned:
            warned = True
            warn(_left_said(left, {*able, *held, *given}))
        given = {lease for lease in given - held - left if (row := rows.get(lease)) is None or not row.held}
        if not held and not given:
            return not warned
        if time.monotonic() > deadline:
            trouble = f"{name} has not handed over" if held else "no other instance has taken"
            raise BusyError(
                f"{trouble} {', '.join(sorted(held or given)[:_SAID_MAX])} within {_WAIT_S:g} s",
                hint="it goes on handing over; its log says what it waits for" if held else _UNTAKEN_HINT,
            )
        time.sleep(_POLL_S)


def _left_said(left: Collection[str], work: Collection[str]) -> str:
    if len(left) == len(work):
        return "no other instance takes the work: nothing is read and delivered until one does"
    return f"no other instance takes {', '.join(sorted(left)[:_SAID_MAX])}: that is not done until one does"


def _rows(leases: LeaseStore, deadline: float) -> dict[str, LeaseRow]:
    """A store of leases that does not answer in time is asked again: the order was given."""
    while True:
        try:
            return leases.rows()
        except UnreachableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_S)


def _held(rows: dict[str, LeaseRow]) -> dict[str, list[LeaseRow]]:
    from evermark.cluster.members import member_of

    found: dict[str, list[LeaseRow]] = defaultdict(list)
    for row in rows.values():
        if row.holder is not None and row.held:
            found[member_of(row.holder.instance)].append(row)
    return found


def _listed(members: dict[str, Member], rows: dict[str, LeaseRow]) -> list[dict[str, Any]]:
    """Instances that announced themselves, and holders of leases that did not: an older program, or a command."""
    held = _held(rows)
    living = {name: member for name, member in members.items() if member.lives}
    found = []
    for name in sorted({*living, *held}):
        mine, member = held.get(name, []), living.get(name)
        holder: Holder | None = member.holder if member is not None else mine[0].holder
        assert holder is not None  # noqa: S101 - a lease that is held has a holder
        found.append(
            {
                "instance": name,
                "host": holder.host,
                "pid": holder.pid,
                "state": "unknown" if member is None else "draining" if member.draining else "running",
                "leases": [row.name for row in mine],
                "epochs": {row.name: row.epoch for row in mine},
                "expires_at": min((row.expires_at for row in mine if row.expires_at), default=None),
            }
        )
    return found
