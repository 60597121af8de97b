"""`evermark source recover`: a gap in a source, shown, and a person's word on it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import EXIT_WRONG, confirm, say, show, show_json
from evermark.cli.deployment import as_holder, config_at, holder_in, known_source, opened, own_lease
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption, YesOption
from evermark.errors import ConfigError, EvermarkError, FormatError, GapError, NotFoundError
from evermark.ingest.repair.base import Choice, Recovery
from evermark.observe.finding import for_source

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.app.inspect import PartitionStatus
    from evermark.sources.kinds import Installation

NameArgument = Annotated[
    str | None, typer.Argument(metavar="NAME", show_default=False, help="May be left out when there is only one.")
]
_NOT_TOLD = ("source", "by_person", "left_at", "position")
_COLUMNS = ("id", "partition", "opened_at", "choice", "asked_by", "step", "tries", "taken", "reason", "error")


def recover(
    name: NameArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    choice: Annotated[
        Choice | None,
        typer.Option(help="repair: take what the log lacks, then go on. skip: go on from now, accept the gap."),
    ] = None,
    accept_fork: Annotated[
        str | None,
        typer.Option(
            metavar="STREAM", help="A stale block stream: what its nodes have of it now is right. It is taken anew."
        ),
    ] = None,
    partition: Annotated[int | None, typer.Option(min=0, help="Only this partition.")] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """What is wrong with a source, and what was done about it; with --choice, what is to be done.

    A running instance begins within a second or two; without one, the next `evermark up` does. A lost slot needs
    nobody: it is repaired by itself. A database that was restored, cloned or promoted needs your word, and so does a
    block stream whose history was rewritten.
    """
    from evermark.app.inspect import may_have_state

    if accept_fork is not None and choice is not None:
        raise typer.BadParameter("one at a time: --choice is for a whole source", param_hint="--accept-fork")
    found = config_at(config)
    chosen = known_source(found.sources, name)
    if not may_have_state(found):
        raise NotFoundError("nothing was ever started here: there is nothing to recover", hint="evermark up")
    with opened(config) as deployment:
        if accept_fork is not None:
            document = _accept(deployment, chosen, accept_fork, yes=yes)
            if as_json:
                show_json(document)
            say(f"{chosen}: {_reader(document)} takes {accept_fork} anew, and compares it with the log")
            return
        partitions = _statuses(deployment, chosen, partition)
        document = _document(deployment, chosen, partitions)
        if choice is not None:
            unwell = _unwell(chosen, partitions)
            if not as_json:
                now = datetime.now(UTC)
                _say_troubles(chosen, [_as_json(each, now) for each in unwell], document["events"])
            if choice is Choice.SKIP:
                confirm(f"Go on from now with {chosen}, and never take what lies between?", yes=yes)
            document["asked"] = [_row(_ask(deployment, chosen, each, choice)) for each in unwell]
    if as_json:
        show_json(document)
    elif choice is not None:
        _say_asked(document, choice)
    else:
        _show(document)
    if choice is None and document["needs_person"]:
        raise typer.Exit(EXIT_WRONG)


def go_on(config: Path, name: str, installation: Installation) -> None:
    """After an install where there was one before: how reading goes on, and what is asked for so that it does.

    A person who installs here again has said that this place is right; only another server is not taken for granted.
    """
    with opened(config) as deployment:
        for each in _statuses(deployment, name, None):
            where = f"{name}/{each.partition}"
            if each.checkpoint is None or each.trouble is None:
                continue
            say(f"{where}: events were taken here before, up to batch {each.checkpoint.batch}: {each.trouble.message}")
            if not isinstance(each.trouble, GapError) or not each.repairable:
                say(f"  hint: {each.trouble.hint}")
            elif not installation.keeps_events:
                say(f"  to go on from now, without what lies between: evermark source recover {name} --choice skip")
            elif not installation.same_place(
                each.checkpoint.position, deployment.sources[name].earliest(each.partition)
            ):
                say(f"  to go on at this server: evermark source recover {name} --choice repair")
            else:
                _ask(deployment, name, each, Choice.REPAIR)
                say("  reading goes on with what the outbox holds. What changed while there was none is in no event")


def _statuses(deployment: Deployment, name: str, partition: int | None) -> list[PartitionStatus]:
    from evermark.app.inspect import statuses

    source = deployment.sources[name]
    if partition is not None and partition not in source.partitions():
        raise NotFoundError(f"{name} has no partition {partition}", hint=f"it has {list(source.partitions())}")
    checkpoints, heads = partial(deployment.checkpoints.list, name), partial(deployment.heads.load, name)
    found = statuses(source, name, checkpoints, heads, deployment.recoveries, deployment.log_folder(name))
    for each in found:
        if each.trouble is not None and len(deployment.config.sources) > 1:
            each.trouble.hint = for_source(each.trouble.hint, name)
    return [each for each in found if partition is None or each.partition == partition]


def _document(deployment: Deployment, name: str, found: Sequence[PartitionStatus]) -> dict[str, Any]:
    now = datetime.now(UTC)
    may_choose = any(isinstance(each.trouble, GapError) and each.repairable for each in found)
    return {
        "source": name,
        "owner": _owner(deployment, name),
        "needs_person": any(each.needs_person(now) for each in found),
        "may_choose": may_choose,
        "partitions": [_as_json(each, now) for each in found],
        "events": _numbers(deployment, name) if may_choose else None,
        "stale": _stale(deployment, name),
        "past": [_row(recovery) for each in found for recovery in each.past],
    }


def _owner(deployment: Deployment, name: str) -> str | None:
    from evermark.cluster.fence import source_lease

    return holder_in(deployment.leases.rows(), source_lease(name))


def _reader(document: dict[str, Any]) -> str:
    return "the running instance" if document["owner"] else "the next `evermark up`"


def _stale(deployment: Deployment, name: str) -> dict[str, str]:
    """Streams that cannot be read on, and why; the first ones, of a source that has such."""
    try:
        found = deployment.sources[name].condition()
    except EvermarkError:
        return {}  # a place that does not answer has said so already
    return {each.stream: each.reason for stale in found.stale.values() for each in stale.first}


def _accept(deployment: Deployment, name: str, stream: str, *, yes: bool) -> dict[str, Any]:
    forks = deployment.sources[name].forks()
    if forks is None:
        raise ConfigError(f"sources.{name} has no block streams", hint="--accept-fork is for sources of type blocks")
    reason = forks.stale_reason(stream)
    say(f"{name}: {stream} is stale: {reason}")
    confirm(f"Take what the nodes have of {stream} now for the right one, from its first block on?", yes=yes)
    forks.accept_fork(stream)
    return {"source": name, "owner": _owner(deployment, name), "accepted": stream, "reason": reason}


def _as_json(status: PartitionStatus, now: datetime) -> dict[str, Any]:
    trouble, current = status.trouble, status.current
    return {
        "partition": status.partition,
        "trouble": trouble.message if trouble else None,
        "kind": str(trouble.kind) if trouble else None,
        "hint": trouble.hint if trouble else None,
        "needs_person": status.needs_person(now),
        "batch": status.checkpoint.batch if status.checkpoint else None,
        "position": status.checkpoint.position if status.checkpoint else None,
        "recovery": _row(current) if current else None,
    }


def _row(recovery: Recovery) -> dict[str, Any]:
    by = "person" if recovery.by_person else "itself"
    told = {key: value for key, value in vars(recovery).items() if key not in _NOT_TOLD}
    return {**told, "asked_by": by, "error": recovery.error or None}


def _numbers(deployment: Deployment, name: str) -> dict[str, Any] | None:
    """What the choice is about; None for a source that cannot tell, or a place that does not answer. `unread`: why the
    time of the log's newest event is not known."""
    from evermark.app.inspect import newest
    from evermark.log.read import LogReader
    from evermark.sources.kinds import kind_of

    settings = deployment.config.sources.get(name)
    if settings is None:
        return None

    unread: str | None = None

    def log_newest() -> datetime | None:
        nonlocal unread
        try:
            seen = newest(LogReader(deployment.log_folder(name)), deployment.sources[name].partitions(), ())
        except FormatError as error:
            unread = f"{error.message}; {error.hint}"
            return None
        return max((each.event_time for each in seen.values() if each.event_time), default=None)

    found = kind_of(settings, name).retained(settings, log_newest)
    return {**vars(found), "unread": unread} if found is not None else None


def _unwell(name: str, found: Sequence[PartitionStatus]) -> list[PartitionStatus]:
    """The partitions that a choice can help."""
    unwell = [each for each in found if each.trouble is not None or each.current is not None]
    if not unwell:
        raise EvermarkError(
            f"nothing is wrong with {name}: there is nothing to choose",
            hint="`evermark doctor` looks at all of it; `evermark checkpoint reset` goes back on purpose",
        )
    for each in unwell:
        if each.trouble is not None and not isinstance(each.trouble, GapError):
            raise each.trouble  # not a gap: no choice repairs it, and its hint says what does
        if not each.repairable:
            raise EvermarkError(f"{name}: this source cannot be repaired", hint="see its own documentation")
    return unwell


def _ask(deployment: Deployment, name: str, status: PartitionStatus, choice: Choice) -> Recovery:
    reason = status.trouble.message if status.trouble else "a person's choice"
    left_at = status.position or ""

    return as_holder(
        deployment,
        own_lease(deployment.leases.rows(), name, status.partition),
        lambda epoch: deployment.recoveries.open(name, status.partition, reason, left_at, epoch, choice),
    )


def _show(document: dict[str, Any]) -> None:
    name = document["source"]
    _say_troubles(name, document["partitions"], document["events"])
    if any(each["trouble"] for each in document["partitions"]):
        if document["needs_person"] and not document["may_choose"]:
            say(f"{name}: there is nothing to choose before that is mended")
        elif document["needs_person"]:
            say(f"{name}: nothing happens by itself. Choose: evermark source recover {name} --choice repair|skip")
        else:
            say(f"{name}: {_reader(document)} repairs it")
    for stream, reason in document["stale"].items():
        say(f"{name}: stream {stream} is stale: {reason}")
    show(document["past"], _COLUMNS, empty=f"{name}: there was no recovery yet")


def _say_troubles(name: str, partitions: Sequence[dict[str, Any]], numbers: dict[str, Any] | None) -> None:
    for each in partitions:
        where = f"{name}/{each['partition']}"
        if each["trouble"]:
            say(f"{where}: {each['trouble']}")
            if each["hint"]:
                say(f"  hint: {each['hint']}")
        elif each["recovery"] is None:
            say(f"{where}: healthy")
        if (current := each["recovery"]) is not None:
            said = f"{where}: {current['choice']} is under way: {current['step']}, {current['tries']} tries"
            say(f"{said}: {current['error']}" if current["error"] else said)
    if numbers is None:
        return
    about = "" if numbers["exact"] else "about "
    held = f"{about}{numbers['count']} of them, {numbers['oldest']} to {numbers['newest']}"
    if numbers["oldest"] is None:
        held = "it is empty now"
    younger = "an unknown number of events"
    if numbers["younger"] is not None:
        more = "" if numbers["younger_exact"] else "more than "
        younger = f"{more}{numbers['younger']} events younger than the last one in the log ({numbers['log_newest']})"
    say(f"  repair: look through `events` ({held}), take what the log lacks, then go on; {younger} are there")
    if numbers["unread"] is not None:
        say(f"          that number is unknown: {numbers['unread']}")
    say("  skip:   go on from now. What the log lacks is never taken; the gap is logged, and stays in this list")


def _say_asked(document: dict[str, Any], choice: Choice) -> None:
    name = document["source"]
    for asked in document["asked"]:
        if asked["choice"] != choice or asked["asked_by"] != "person":
            say(f"{name}/{asked['partition']}: its gap is closed already ({asked['choice']}); it is being finished")
        else:
            say(f"{name}/{asked['partition']}: {choice} is asked for, as recovery {asked['id']}")
    owner = document["owner"]
    say(f"the instance {owner} begins now" if owner else "no instance runs: the next `evermark up` carries it out")
