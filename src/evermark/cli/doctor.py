"""`evermark doctor`: the sources examined, from the server to the checkpoint. Changes nothing, starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import EXIT_WRONG, JsonOption, say, show_json, show_table
from evermark.cli.deployment import DEFAULT_CONFIG, ConfigOption, config_at, known_source, quiet_logging
from evermark.errors import EvermarkError, SetupError

if TYPE_CHECKING:
    from evermark.app.inspect import PartitionStatus
    from evermark.config import Config
    from evermark.observe.finding import Finding
    from evermark.sources.base import Source
    from evermark.sources.kinds import SourceState
    from evermark.state.connection import State


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
    quiet_logging()
    names = sorted(found.sources) if name is None else [known_source(found.sources, name)]
    if not names:
        known_source(found.sources, None)  # says that there is none
    from evermark.observe.finding import Grade, worst

    rows = examined_all(found, names)
    grade = worst(finding for _, finding in rows)
    if as_json:
        show_json({"grade": str(grade), "findings": [finding_row(source, finding) for source, finding in rows]})
    else:
        show_findings(rows)
    if grade is Grade.WRONG:
        raise typer.Exit(EXIT_WRONG)


def examined_all(config: Config, names: Iterable[str]) -> list[tuple[str, Finding]]:
    """What was found of the state, and of each of these sources: its name (empty for the state), and the finding."""
    rows: list[tuple[str, Finding]] = []
    with ExitStack() as stack:
        state, findings = _state(config, stack)
        rows += [("", each) for each in findings]
        for name in names:
            rows += [(name, finding) for finding in _examined(config, name, state)]
    return rows


def _state(config: Config, stack: ExitStack) -> tuple[State | None, list[Finding]]:
    """State as it is. What keeps it from being read is a finding, and not the end of the examination."""
    from evermark.app.inspect import existing_state
    from evermark.observe.finding import ok, wrong

    try:
        state = stack.enter_context(existing_state(config))
    except EvermarkError as error:
        return None, [wrong("state", error.message, error.hint)]
    if state is None:
        return None, [ok("state", "there is none yet: `evermark up` makes it")]
    where = "of the dsn" if config.state.dsn is not None else "embedded"
    return state, [ok("state", f"{where}, schema {state.schema}")]


def _examined(config: Config, name: str, state: State | None) -> Iterator[Finding]:
    from evermark.app.build import source_context
    from evermark.sources.kinds import kind_of

    settings = config.sources[name]
    look = None if state is None else partial(_look, config, name, state)
    yield from kind_of(settings, name).examine(settings, source_context(config, name, None), look)


def _look(config: Config, name: str, state: State, source: Source) -> SourceState:
    """What State and the log say of a source, and what follows from it."""
    from evermark.sources.kinds import SourceState

    owner = owner_of(state, name)
    standings = _standings(config, name, source, state)
    return SourceState(
        owner,
        {each.partition: each.checkpoint.position for each in standings if each.checkpoint is not None},
        frozenset(each.partition for each in standings if each.current is not None),
        tuple(_judged_by_state(standings, owner)),
    )


def _judged_by_state(standings: list[PartitionStatus], owner: str | None) -> Iterator[Finding]:
    from evermark.app.inspect import judged
    from evermark.observe.finding import ok, warning

    for standing in standings:
        yield from judged(standing, owner)
    if owner is not None:
        yield ok("reader", f"read by {owner}")
    elif not any(isinstance(standing.trouble, SetupError) for standing in standings):  # where nothing is installed yet
        yield warning("reader", "no instance reads it just now: events wait at the source", "evermark up")


def _standings(config: Config, name: str, source: Source, state: State) -> list[PartitionStatus]:
    from evermark.app.build import local_log
    from evermark.app.inspect import standings
    from evermark.checkpoints.kinds import open_checkpoints
    from evermark.ingest.repair.postgres import Recoveries

    checkpoints = open_checkpoints(config.reliability.checkpoint, state)
    return standings(
        source,
        name,
        lambda: checkpoints.list(name),
        Recoveries(state),
        local_log(config) / name,
    )


def owner_of(state: State, name: str) -> str | None:
    """The process that holds the lease of a source."""
    from evermark.cluster.fence import source_lease
    from evermark.cluster.postgres import lease_rows

    lease = lease_rows(state).get(source_lease(name))
    return f"{lease.holder.host}:{lease.holder.pid}" if lease is not None and lease.held and lease.holder else None


def finding_row(source: str, finding: Finding) -> dict[str, Any]:
    from evermark.observe.logging import without_secrets

    return {
        "source": source or None,
        "check": finding.check,
        "grade": str(finding.grade),
        "found": without_secrets(finding.found),
        "mend": without_secrets(finding.mend) or None,
    }


def show_findings(rows: list[tuple[str, Finding]]) -> None:
    told = [finding_row(source, finding) for source, finding in rows]
    columns = ("source", "check", "grade", "found")
    show_table(columns, [[row[column] for column in columns] for row in told])
    for row in told:
        if row["mend"]:
            say(f"{row['grade']}: {row['source'] or 'deployment'}, {row['check']}\n  do: {row['mend']}")
    counts = Counter(row["grade"] for row in told)
    say(", ".join(f"{counts[grade]} {grade}" for grade in ("wrong", "warning", "ok") if counts[grade]))
