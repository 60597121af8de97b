"""`evermark config`: the file, examined before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.cli.console import noun
from evermark.cli.deployment import config_at
from evermark.cli.doctor import Found, examined_all, show_findings
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption
from evermark.errors import ConfigError
from evermark.observe.finding import ok, wrong

if TYPE_CHECKING:
    from evermark.config import Config

app = noun("Check the file before `evermark up` does.")


@app.command()
def check(
    config: ConfigOption = DEFAULT_CONFIG,
    connect: Annotated[
        bool,
        typer.Option(
            "--connect", help="Ask the sources, the state database and other stores, too, and look at what is there."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find what is wrong with the file, before `evermark up` does.

    It looks at keys, variables, secrets, predicates, streams, bots, folders and the Spark master.

    With --connect also: whether each database answers, and etcd or MongoDB where checkpoints or leases are kept there;
    wal_level, the rights of the role, tables, slot, publication.
    Changes nothing. The exit code is 3 if something is wrong, and 0 if all is well or there are only warnings.
    """
    found, several = _found(config, connect=connect)
    show_findings(found, several=several, as_json=as_json)


def _found(path: Path, *, connect: bool) -> tuple[list[Found], bool]:
    """What was found, and whether the file has several sources."""
    from evermark.app.checking import checked

    try:
        found = config_at(path)
    except ConfigError as error:
        if not path.expanduser().exists():
            raise
        problems = error.each or (error,)
        return [("", wrong("file", each.message, each.hint or f"correct it in {path}")) for each in problems], False
    rows = [("", ok("file", f"{path}, every key and variable is understood"))]
    rows += [("", finding) for finding in checked(found)]
    return rows + _connected(found) if connect else rows, len(found.sources) > 1


def _connected(config: Config) -> list[Found]:
    """What `doctor` finds; where nothing is installed yet, whether that will work instead of all that is missing."""
    from evermark.sources.kinds import kind_of

    rows = examined_all(config, sorted(config.sources))
    for name, settings in sorted(config.sources.items()):
        installation = kind_of(settings, name).installation(settings)
        if installation is not None:
            found = installation.foreseen([finding for source, finding in rows if source == name])
            rows = [row for row in rows if row[0] != name] + [(name, finding) for finding in found]
    return rows
