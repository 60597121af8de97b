"""`evermark doctor`: the sources examined, from the server to the checkpoint. Changes nothing, starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.cli.console import EXIT_WRONG, say, show, show_json
from evermark.cli.deployment import config_at, holder_in, known_source
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption
from evermark.errors import EvermarkError, SetupError
from evermark.observe.finding import Finding, Grade, for_source, ok, warning, worst, wrong
from evermark.storage import Place

if TYPE_CHECKING:
    from evermark.app.inspect import PartitionStatus
    from evermark.config import Config
    from evermark.sources.base import Source
    from evermark.sources.kinds import SourceState
    from evermark.state.connection import State

Found = tuple[str, Finding]  # the name of the source, empty for the deployment itself


def doctor(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", show_default=False, help="Only this source; by default all.")
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
    as_json: JsonOption = False,
) -> None:
    """Examine the sources, and say what is wrong and what to run: server, outbox, slot, WAL, tables, checkpoint.

    Changes nothing. The exit code is 3 if something is wrong, and 0 if all is well or there are only warnings.
    """
    found = config_at(config)
    all_wanted = name is None and found.sources
    names = sorted(found.sources) if all_wanted else [known_source(found.sources, name)]
    show_findings(examined_all(found, names), several=len(found.sources) > 1, as_json=as_json)


def examined_all(config: Config, names: Iterable[str]) -> list[Found]:
    """What was found of the state, and of each of these sources."""
    from evermark.app.build import source_context
    from evermark.app.inspect import existing_state
    from evermark.checkpoints.kinds import backend_of
    from evermark.sources.kinds import kind_of

    with ExitStack() as stack:
        state: State | None = None
        is_new = False
        try:
            state = stack.enter_context(existing_state(config))
        except EvermarkError as error:  # a finding, and not the end of the examination
            about_state = wrong("state", error.message, error.hint)
        else:
            where = "of the dsn" if config.state.dsn is not None else "embedded"
            said = f"{where}, schema {state.schema}" if state else "there is none yet: `evermark up` makes it"
            about_state, is_new = ok("state", said), state is None
        rows = [("", about_state)]
        names = list(names)
        if backend_of(config.reliability.checkpoint).outside:
            rows.append(("", _about_checkpoints(config, state, names, is_new=is_new)))
        if config.cluster.leases.backend != "postgres":
            rows.append(("", _about_leases(config, state, is_new=is_new)))
        for name in names:
            settings = config.sources[name]
            look = None if state is None else partial(_look, config, name, state)
            kind, context = kind_of(settings, name), source_context(config, name, None)
            try:
                examined = list(kind.examine(settings, context, look))
            except EvermarkError as error:  # of what State and the log say of it: the source itself is examined
                examined = [*kind.examine(settings, context, None), wrong("log", error.message, error.hint)]
            rows += [(name, finding) for finding in examined]
    return rows


def _about_checkpoints(config: Config, state: State | None, names: Iterable[str], *, is_new: bool) -> Finding:
    from evermark.checkpoints.kinds import look_at_checkpoints, open_checkpoints
    from evermark.state.connection import schema_for

    settings = config.reliability.checkpoint
    try:
        if state is None:
            look_at_checkpoints(settings, schema_for(config.name), is_new=is_new)
            return ok("checkpoints", f"in {settings.backend}, which answers")
        store = open_checkpoints(settings, state)
        kept = sum(len(store.list(name)) for name in names)
    except EvermarkError as error:
        return wrong("checkpoints", error.message, error.hint)
    return ok("checkpoints", f"in {settings.backend}, of {kept} partitions")


def _about_leases(config: Config, state: State | None, *, is_new: bool) -> Finding:
    from evermark.cluster.kinds import look_at_leases, open_leases
    from evermark.state.connection import schema_for

    settings = config.cluster.leases
    try:
        if state is None:
            look_at_leases(settings, schema_for(config.name), is_new=is_new)
            return ok("leases", f"in {settings.backend}, which answers")
        held = sum(row.held for row in open_leases(settings, state).rows().values())
    except EvermarkError as error:
        return wrong("leases", error.message, error.hint)
    return ok("leases", f"in {settings.backend}; {held} are held")


def _look(config: Config, name: str, state: State, source: Source) -> SourceState:
    """What State and the log say of a source, and what follows from it."""
    from evermark.app.build import log_place
    from evermark.app.inspect import statuses
    from evermark.checkpoints.kinds import open_checkpoints
    from evermark.cluster.fence import source_lease
    from evermark.ingest.repair.postgres import Recoveries
    from evermark.log.head import PostgresHeads
    from evermark.sources.kinds import SourceState

    owner = _owner(config, state, source_lease(name))
    checkpoints = open_checkpoints(config.reliability.checkpoint, state)
    heads, recoveries = PostgresHeads(state), Recoveries(state)
    found = statuses(
        source, name, partial(checkpoints.list, name), partial(heads.load, name), recoveries, log_place(config) / name
    )
    return SourceState(
        owner,
        {each.partition: each.position for each in found if each.position is not None},
        frozenset(each.partition for each in found if each.current is not None),
        (*_judged_by_state(found, owner), *_about_files(log_place(config), name)),
    )


def _about_files(root: Place, name: str) -> Iterator[Finding]:
    from evermark.log.maintenance import Maintenance
    from evermark.log.read import sources_at

    missing = Maintenance(root / name).missing() if name in sources_at(root) else []
    if missing:
        events = sum(file.rows for file in missing)
        said = f"{len(missing)} files with {events} events are missing, the first is {Path(missing[0].path).name}"
        yield wrong("log", said, f"put them back from a copy: evermark log missing --source {name} lists them")


def _owner(config: Config, state: State, lease: str) -> str | None:
    from evermark.cluster.kinds import open_leases

    try:
        return holder_in(open_leases(config.cluster.leases, state).rows(), lease)
    except EvermarkError:
        return None  # a finding of its own says why


def _judged_by_state(found: list[PartitionStatus], owner: str | None) -> Iterator[Finding]:
    from evermark.app.inspect import judged

    for status in found:
        yield from judged(status, owner)
    if owner is not None:
        yield ok("reader", f"read by {owner}")
    elif not any(isinstance(status.trouble, SetupError) for status in found):  # where nothing is installed yet
        yield warning("reader", "no instance reads it just now: events wait at the source", "evermark up")


def show_findings(found: list[Found], *, several: bool, as_json: bool) -> None:
    """Show what was found; the exit code says whether something is wrong. `several`: whether the file has several
    sources, so that commands have to name theirs.
    """
    from evermark.observe.logging import without_secrets

    rows = [
        {
            "source": source or None,
            "check": finding.check,
            "grade": str(finding.grade),
            "found": without_secrets(finding.found),
            "mend": without_secrets(for_source(finding.mend, source) if several else finding.mend) or None,
        }
        for source, finding in found
    ]
    grade = worst(finding for _, finding in found)
    if as_json:
        show_json({"grade": str(grade), "findings": rows})
    else:
        show(rows, ("source", "check", "grade", "found"))
        for row in rows:
            if row["mend"]:
                say(f"{row['grade']}: {row['source'] or 'deployment'}, {row['check']}\n  do: {row['mend']}")
        counts = Counter(row["grade"] for row in rows)
        say(", ".join(f"{counts[grade]} {grade}" for grade in ("wrong", "warning", "ok") if counts[grade]))
    if grade is Grade.WRONG:
        raise typer.Exit(EXIT_WRONG)
