"""`evermark config`: the file, examined before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.cli.console import EXIT_WRONG, JsonOption, noun, show_json
from evermark.cli.deployment import DEFAULT_CONFIG, ConfigOption, config_at, quiet_logging
from evermark.cli.doctor import examined_all, finding_row, show_findings
from evermark.errors import ConfigError

if TYPE_CHECKING:
    from evermark.config import Config
    from evermark.observe.finding import Finding

app = noun("Check the file before `evermark up` does.")


@app.callback()
def _noun() -> None:
    """Check the file before `evermark up` does."""


@app.command()
def check(
    config: ConfigOption = DEFAULT_CONFIG,
    connect: Annotated[
        bool,
        typer.Option("--connect", help="Ask the sources and the state database too, and look at what is there."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong with the file, before `evermark up` does.

    It looks at keys, variables, secrets, predicates, streams, bots, folders and the Spark master.

    With --connect also: whether each database answers, wal_level, the rights of the role, tables, slot, publication.
    Changes nothing. The exit code is 3 if something is wrong, and 0 if all is well or there are only warnings.
    """
    quiet_logging()
    from evermark.observe.finding import Grade, worst

    rows = _found(config, connect=connect)
    grade = worst(finding for _, finding in rows)
    if as_json:
        show_json({"grade": str(grade), "findings": [finding_row(source, finding) for source, finding in rows]})
    else:
        show_findings(rows)
    if grade is Grade.WRONG:
        raise typer.Exit(EXIT_WRONG)


def _found(path: Path, *, connect: bool) -> list[tuple[str, Finding]]:
    from evermark.observe.finding import ok, wrong

    if not path.expanduser().exists():
        config_at(path)  # says that there is none
    try:
        found = config_at(path)
    except ConfigError as error:
        problems = error.each or (error,)
        return [("", wrong("file", each.message, each.hint or f"correct it in {path}")) for each in problems]
    from evermark.app.checking import checked

    rows = [("", ok("file", f"{path}, every key and variable is understood"))]
    rows += [("", finding) for finding in checked(found)]
    if connect:
        rows += _connected(found)
    return rows


def _connected(config: Config) -> list[tuple[str, Finding]]:
    """What `doctor` finds; where nothing is installed yet, whether that will work instead of all that is missing."""
    from evermark.sources.kinds import kind_of

    rows = examined_all(config, sorted(config.sources))
    for name, settings in sorted(config.sources.items()):
        installation = kind_of(settings, name).installation(settings)
        if installation is not None:
            found = installation.foreseen([finding for source, finding in rows if source == name])
            rows = [row for row in rows if row[0] != name] + [(name, finding) for finding in found]
    return rows
