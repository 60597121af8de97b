"""The deployment a command works on: its file, its state, and the leases without which nothing of it is changed.

Drivers are loaded in here, when a command needs them: `evermark --help` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from evermark.cli.console import printable, warn
from evermark.errors import BusyError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.cluster.base import Lease
    from evermark.cluster.postgres import LeaseRow
    from evermark.config import Config

T = TypeVar("T")

ConfigOption = Annotated[Path, typer.Option("--config", "-c", envvar="EVERMARK_CONFIG", help="The deployment's file.")]
DEFAULT_CONFIG = Path("evermark.yaml")


def config_at(path: Path) -> Config:
    from evermark.config import load

    return load(path)


def quiet_logging() -> None:
    """Commands that report on stdout keep it clean: only warnings are logged, to stderr."""
    from evermark.observe.logging import set_up_logging

    set_up_logging(json=False, level="warning")


@contextmanager
def opened(path: Path) -> Iterator[Deployment]:
    """The deployment behind a file, open for the length of a command. No instance has to run."""
    config = config_at(path)
    quiet_logging()
    from evermark.app.build import open_deployment

    deployment = open_deployment(config)
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
def held_sources(deployment: Deployment, names: Iterable[str]) -> Iterator[Mapping[str, Lease]]:
    """Hold the leases of these sources: no instance reads them meanwhile. Refused while one does."""
    from evermark.cluster.fence import source_lease
    from evermark.cluster.holding import LIMITS, HeldLease
    from evermark.observe.logging import get_logger
    from evermark.runtime import Threads

    with ExitStack() as stack:
        held: dict[str, Lease] = {}
        for name in sorted(names):
            lease = deployment.leases.acquire(source_lease(name), deployment.holder, LIMITS.ttl_s)
            if lease is None:
                raise BusyError(
                    f"source {name} is being read by {owner_of(deployment, source_lease(name))}",
                    hint="stop that `evermark up` first; this is safe only while nobody reads the source",
                )
            stack.callback(HeldLease(deployment.leases, lease, Threads(), get_logger()).close)
            held[name] = lease
        yield held


def as_deliverer(deployment: Deployment, step: Callable[[int], T]) -> T:
    """One transaction of a person's on the delivery state."""
    from evermark.cluster.fence import DELIVER_LEASE

    return as_holder(deployment, DELIVER_LEASE, step)


def as_holder(deployment: Deployment, name: str, step: Callable[[int], T]) -> T:
    """Do one transaction of a person's on what a lease guards, with the epoch that holds it."""
    from evermark.cluster import holding
    from evermark.cluster.postgres import owner_epoch

    return holding.as_holder(
        deployment.leases, name, deployment.holder, lambda: owner_epoch(deployment.state, name), step
    )


def warn_of_streams(deployment: Deployment, streams: Iterable[str]) -> None:
    """Say which of these streams nothing is known of. They may begin later, so it is no error."""
    from evermark.app.checking import stream_warnings

    for text in stream_warnings(deployment.config, deployment.log_root, streams):
        warn(text)


def lease_rows(deployment: Deployment) -> dict[str, LeaseRow]:
    from evermark.cluster.postgres import lease_rows as read

    return read(deployment.state)


def owner_of(deployment: Deployment, lease: str) -> str:
    """Who holds a lease, for a sentence."""
    row = lease_rows(deployment).get(lease)
    if row is None or row.holder is None:
        return "another instance"
    return f"an instance on {row.holder.host}, process {row.holder.pid}"
