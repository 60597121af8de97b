"""`evermark checkpoint`: where each partition stopped; kept, put back, forgotten."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.checkpoints.backup import Backup, read_backup, to_text, write_backup
from evermark.checkpoints.base import Checkpoint
from evermark.cli.console import confirm, noun, say, show, warn
from evermark.cli.deployment import as_deliverer, held_sources, known_source, opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption, YesOption
from evermark.errors import ConfigError, ConflictError, FormatError, NotFoundError
from evermark.ingest.repair.base import Choice

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.log.head import Head

app = noun("Checkpoints: how far each source was read.")


class From(StrEnum):
    """Where reading goes on after a reset."""

    LOG = "log"
    OLDEST = "oldest"
    NOW = "now"
    RESYNC = "resync"


# Reading once more from the oldest would have to know, until it is through, which of it the log has: comparing does.
_CHOICES = {From.NOW: Choice.SKIP, From.RESYNC: Choice.REPAIR, From.OLDEST: Choice.REPAIR}

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", show_default=False)]


@app.command("list")
def list_checkpoints(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the checkpoints. Everything before the position of a checkpoint is in the log, durably."""
    with opened(config) as deployment:
        rows = [
            {"source": source, "partition": partition, **vars(checkpoint)}
            for (source, partition), checkpoint in _all(deployment).items()
        ]
    columns = ("source", "partition", "batch", "epoch", "position")
    show(rows, columns, as_json=as_json, empty="there is none yet; `evermark up` makes them")


@app.command()
def backup(
    file: FileArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write all checkpoints to a file. Instances may go on running."""
    with opened(config) as deployment:
        _require_durable(deployment)
        found = _all(deployment)
        text = to_text(deployment.config.name, found, datetime.now(UTC))
    write_backup(file, text, force=force)
    say(f"wrote {len(found)} checkpoints to {file}")


@app.command()
def restore(file: FileArgument, config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Put the checkpoints of a file back. Refused while an instance reads one of their sources."""
    kept = read_backup(file)
    with opened(config) as deployment:
        _require_durable(deployment)
        if kept.deployment != deployment.config.name:
            raise ConfigError(
                f"{file.name} is of deployment {kept.deployment[:80]!r}, and this is {deployment.config.name!r}",
                hint="name the file of this deployment",
            )
        names = {known_source(deployment.sources, source) for source, _ in kept.checkpoints}
        _require_partitions(deployment, kept, file.name)
        with held_sources(deployment, names) as leases:
            for (source, partition), checkpoint in kept.checkpoints.items():
                log_batch = _log_batch(deployment, source, partition)
                if checkpoint.batch > log_batch:
                    where, batch = f"{source}/{partition}", checkpoint.batch
                    raise ConflictError(
                        f"the checkpoint of {where} is of batch {batch}, and the log ends at {log_batch}",
                        hint=f"put the log back first; or forget the checkpoint: evermark checkpoint reset {source}",
                    )
            heads = deployment.heads.load_all()
            for (source, partition), checkpoint in kept.checkpoints.items():
                again = replace(_not_behind(checkpoint, heads.get((source, partition))), epoch=leases[source].epoch)
                deployment.checkpoints.save(source, partition, again)
    say(f"restored {len(kept.checkpoints)} checkpoints of {kept.made_at}; next: evermark up")


@app.command()
def reset(
    source: Annotated[str, typer.Argument(metavar="SOURCE", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    begin: Annotated[
        From,
        typer.Option(
            "--from",
            help="log: where the log ends, or was passed since; without an event, where it began. oldest, resync:"
            " compare all that the source has with the log, and take what differs; without an event, oldest begins as"
            " at the first start, and resync as log. now: never take what lies between.",
        ),
    ] = From.LOG,
    yes: YesOption = False,
) -> None:
    """Forget the checkpoints of a source, and say where reading goes on.

    By itself it goes on where the log ends, or was passed since, or, before the first event, where it began: nothing
    is repeated, and nothing is lost that the source still has.

    Refused while an instance reads the source. Needed when the log was put back from a backup: what it misses is
    taken from the source again, and delivered again.
    """
    with opened(config) as deployment:
        _require_durable(deployment)
        known_source(deployment.sources, source)
        choice = _CHOICES.get(begin)
        known = _partitions(deployment, source)
        chosen = sorted(known if partition is None else known & {partition})
        if not chosen:
            where = source if partition is None else f"{source}/{partition}"
            raise NotFoundError(f"no checkpoint of {where}", hint="`evermark checkpoint list` shows all checkpoints")
        there = set(deployment.sources[source].partitions())  # of others nothing is read any more
        for each in sorted(there.intersection(chosen)):
            is_needed = begin is From.NOW or (choice is not None and _log_batch(deployment, source, each))
            if is_needed and deployment.sources[source].repair(each) is None:
                raise ConfigError(f"sources.{source} cannot be compared or skipped", hint="use --from log for it")
        if begin is From.NOW:
            confirm(f"Go on from now with {source}, and never take what lies between?", yes=yes)
        with held_sources(deployment, [source]) as leases:
            for each in chosen:
                _forget(deployment, source, each, leases[source].epoch, anew=begin is From.OLDEST)
                if each in there:
                    _begin_elsewhere(deployment, source, each, leases[source].epoch, begin)


def _require_partitions(deployment: Deployment, kept: Backup, name: str) -> None:
    for source, partition in kept.checkpoints:
        if partition not in deployment.sources[source].partitions():
            raise ConfigError(
                f"{name} has a checkpoint of {source}/{partition}, and sources.{source} has no such partition now",
                hint="name a backup made since, or give the source as many partitions as it had",
            )


def _partitions(deployment: Deployment, source: str) -> set[int]:
    """All that may have a checkpoint. One that cannot be read is forgotten like the others: its error says so."""
    begun = set(deployment.heads.load(source))
    try:
        return begun | set(deployment.checkpoints.list(source))
    except FormatError as error:
        warn(error.message)
        return begun | set(deployment.sources[source].partitions())


def _not_behind(checkpoint: Checkpoint, head: Head | None) -> Checkpoint:
    """What was passed since without an event, the source may have forgotten: reading does not go back behind it."""
    if head is not None and head.batch == checkpoint.batch and head.passed_to > checkpoint.position:
        return replace(checkpoint, position=head.passed_to)
    return checkpoint


def _forget(deployment: Deployment, source: str, partition: int, epoch: int, *, anew: bool) -> None:
    from evermark.checkpoints.reset import reset as reset_checkpoint

    where, log_batch = f"{source}/{partition}", _log_batch(deployment, source, partition)
    stores = deployment.state, deployment.checkpoints
    forget = partial(reset_checkpoint, *stores, source, partition, log_batch, source_epoch=epoch, anew=anew)
    back = as_deliverer(deployment, lambda deliver_epoch: forget(deliver_epoch=deliver_epoch))
    if partition not in deployment.sources[source].partitions():
        say(f"{where}: forgotten; the source has no such partition now")
    elif log_batch:
        behind = f"where batch {log_batch}, the last in the log, ends, or where the source was passed since"
        say(f"{where}: forgotten; by itself reading goes on {behind}")
    elif partition in deployment.heads.load(source):
        say(f"{where}: forgotten; it had no event yet; by itself reading goes on where it began, or was passed since")
    else:
        say(f"{where}: forgotten; the log has nothing of it, so reading begins as at the first start")
    if back:
        say(f"{where}: {back} readers were ahead of the log and are back at batch {log_batch}")


def _begin_elsewhere(deployment: Deployment, source: str, partition: int, epoch: int, begin: From) -> None:
    where = f"{source}/{partition}"
    choice = _CHOICES.get(begin)
    if choice is Choice.REPAIR and not _log_batch(deployment, source, partition):
        if begin is From.RESYNC:
            again = f"evermark checkpoint reset {source} --from {begin}"
            say(f"{where}: nothing is compared, for the log has no event of it: once it has one, stop, and {again}")
        return
    if choice is not None:
        deployment.recoveries.open(source, partition, f"checkpoint reset --from {begin}", "", epoch, choice)
        done = "skips to now" if choice is Choice.SKIP else "compares the source with the log first"
        say(f"{where}: the next `evermark up` {done}")


def _all(deployment: Deployment) -> dict[tuple[str, int], Checkpoint]:
    return {
        (source, partition): checkpoint
        for source in sorted(deployment.sources)
        for partition, checkpoint in deployment.checkpoints.list(source).items()
    }


def _require_durable(deployment: Deployment) -> None:
    from evermark.checkpoints.kinds import backend_of

    settings = deployment.config.reliability.checkpoint
    if not backend_of(settings).durable:
        raise ConfigError(
            f"reliability.checkpoint.backend is {settings.backend}: checkpoints end with the process that made them",
            hint="use postgres, the default",
        )


def _log_batch(deployment: Deployment, source: str, partition: int) -> int:
    from evermark.log.read import LogReader, sources_at

    if source not in sources_at(deployment.log_root):
        return 0
    return LogReader(deployment.log_folder(source)).tail_batch(partition)
