"""The deployment a command works on: its file, its state, and the leases without which nothing of it is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from evermark.cli.console import printable, warn
from evermark.cluster import holding
from evermark.cluster.base import Lease, LeaseRow, owner_epoch
from evermark.errors import BusyError, ConfigError, EvermarkError, NotFoundError
from evermark.observe.finding import for_source
from evermark.runtime import Threads

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.config import Config

T = TypeVar("T")


def config_at(path: Path) -> Config:
    """The file, read. From here on only warnings are logged, to stderr: stdout is for what was asked for."""
    from evermark.config import load
    from evermark.observe.logging import set_up_logging

    set_up_logging(json=False, level="warning")
    return load(path)


@contextmanager
def opened(path: Path) -> Iterator[Deployment]:
    """The deployment behind a file, open for the length of a command. No instance has to run."""
    from evermark.app.build import open_deployment

    deployment = open_deployment(config_at(path))
    try:
        for warning in deployment.warnings:
            warn(warning)
        yield deployment
    finally:
        deployment.close()


def known_source(names: Iterable[str], name: str | None) -> str:
    """The source that is meant: the only one, or the one named."""
    known = sorted(names)
    if name is None:
        if len(known) == 1:
            return known[0]
        raise ConfigError(
            "which source? there is none" if not known else "which source? there are several",
            hint=f"name one of {', '.join(known)}" if known else "add one under `sources:` in the file",
        )
    if name not in known:
        raise NotFoundError(
            f"no source is called {printable(name[:80])!r}",
            hint=f"there are {', '.join(known)}" if known else "add it under `sources:` in the file",
        )
    return name


@contextmanager
def hints_name(config: Config, name: str) -> Iterator[None]:
    """What to run about an error of this source is said as it can be run."""
    try:
        yield
    except EvermarkError as error:
        if len(config.sources) > 1:
            error.hint = for_source(error.hint, name)
        raise


@contextmanager
def held_sources(deployment: Deployment, names: Iterable[str]) -> Iterator[Mapping[str, Lease]]:
    """Hold the leases of these sources: no instance reads them meanwhile. Refused while one does."""
    from evermark.cluster.fence import is_of
    from evermark.observe.logging import get_logger

    with ExitStack() as stack:
        held: dict[str, Lease] = {}
        for name in sorted(names):
            leases = _acquired(deployment, name)
            if leases is None:
                rows = deployment.leases.rows().values()
                held_by = (row.holder for row in rows if row.held and is_of(row.name, name))
                reader = next(held_by, None)
                who = f"an instance on {reader.host}, process {reader.pid}" if reader else "another instance"
                raise BusyError(
                    f"source {name} is being read by {who}",
                    hint="stop that `evermark up` first; this is safe only while nobody reads the source",
                )
            lease, *also = leases
            stack.callback(
                holding.HeldLease(
                    deployment.leases, lease, Threads(), get_logger(), deployment.lease_limits, also
                ).close
            )
            held[name] = lease
        yield held


def _acquired(deployment: Deployment, name: str) -> list[Lease] | None:
    """All leases of a source, under one epoch; None while an instance has one of them."""
    from evermark.cluster.fence import source_lease

    source, leases, whose = deployment.sources[name], deployment.leases, deployment.holder
    others = [source_lease(name, p) for p in source.partitions() if p] if source.divisible() else []
    if not others:
        lease = leases.acquire(source_lease(name), whose, deployment.lease_limits.ttl_s)
        return [lease] if lease is not None else None
    wanted = [source_lease(name), *others]
    found = (
        leases.acquire_all(wanted, whose, deployment.lease_limits.ttl_s)
        if leases.divide(wanted[0], others, whose)
        else []
    )
    if len(found) == len(wanted):
        return found
    for lease in found:
        leases.release(lease)
    return None


def own_lease(leases: Mapping[str, LeaseRow], source: str, partition: int) -> str:
    """The lease of a partition: that of its source, until an instance has divided the source."""
    from evermark.cluster.fence import source_lease

    own = source_lease(source, partition)
    return own if own in leases else source_lease(source)


def as_holder(deployment: Deployment, name: str, step: Callable[[int], T]) -> T:
    """Do one transaction of a person's on what a lease guards, with the epoch that holds it."""
    return holding.as_holder(
        deployment.leases, name, deployment.holder, lambda: owner_epoch(deployment.leases, name), step
    )


def as_deliverer(deployment: Deployment, step: Callable[[int], T]) -> T:
    """One transaction of a person's on the delivery state."""
    from evermark.cluster.fence import DELIVER_LEASE

    return as_holder(deployment, DELIVER_LEASE, step)


def holder_in(leases: Mapping[str, LeaseRow], lease: str) -> str | None:
    """The process that holds a lease now."""
    row = leases.get(lease)
    return f"{row.holder.host}:{row.holder.pid}" if row is not None and row.held and row.holder else None
