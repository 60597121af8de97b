"""`evermark source`: where events come from, and what must stand there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from evermark.cli.backfill import backfill
from evermark.cli.console import confirm, noun, printable, say, seconds, show
from evermark.cli.deployment import config_at, held_sources, hints_name, known_source, opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption, YesOption
from evermark.cli.recover import NameArgument, go_on, recover
from evermark.errors import ConfigError, EvermarkError

if TYPE_CHECKING:
    from evermark.config import Config
    from evermark.sources.kinds import Installation

app = noun("Sources: where events come from.")

WaitOption = Annotated[
    str,
    typer.Option(
        "--wait", metavar="TIME", help="How long to wait for transactions of others, in all, for example 30s or 2h."
    ),
]
DEFAULT_WAIT = "10m"
# These are always shown; a kind of source may list more.
_COLUMNS = ("source", "type", "mode", "start", "slot", "publication", "tables", "nodes")


@app.command("list")
def list_sources(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """List the sources of the file. Connects to nothing."""
    rows = [
        {**dict.fromkeys(_COLUMNS), "tables": [], "source": name, "type": settings.type, **settings.listed()}
        for name, settings in sorted(config_at(config).sources.items())
    ]
    columns = dict.fromkeys((*_COLUMNS, *(key for row in rows for key in row)))
    show(rows, tuple(columns), as_json=as_json, empty="there is none; add one under `sources:` in the file")


@app.command()
def install(
    name: NameArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            "-t",
            metavar="T",
            help="Capture this table, too, written as in SQL: public.orders, 'public.\"Orders\"'. Repeatable.",
        ),
    ] = None,
    wait: WaitOption = DEFAULT_WAIT,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the SQL for a DBA and do nothing; connects to nothing.")
    ] = False,
    role: Annotated[
        str, typer.Option(help="With --print: the role that will read, with the least rights.")
    ] = "evermark",
    no_role: Annotated[bool, typer.Option("--no-role", help="With --print: leave the grants out.")] = False,
) -> None:
    """Set up outbox, publication, slot and triggers. May be repeated: what is there stays, or is upgraded in place.

    In mode `tables` it is publication and slot alone, for the tables of the file.

    Making the slot waits for every transaction that is open and has written; putting triggers on a table waits for
    transactions that use the table. Meanwhile it is said whose they are. If it fails, what it made is taken away again.
    """
    found = config_at(config)
    chosen, installation = _installation(found, name)
    tables = _tables(installation, table or [])
    if only_print:
        typer.echo(installation.script(tables, None if no_role else role), nl=False)
        return
    before = False if installation.registered() else _remembers(found, chosen)
    done = installation.install(
        tables,
        wait_s=seconds(wait, "--wait"),
        say=lambda line: say(f"{chosen}: {line}"),
        goes_on=before is not False,
    )
    for line in done:
        say(f"{chosen}: {line}")
    if before:
        go_on(config, chosen, installation)
    say("next: evermark up")


@app.command(short_help="Remove what `source install` made.")
def uninstall(
    name: NameArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            "-t",
            metavar="T",
            help="Only stop capturing this table, written as in SQL: public.orders, 'public.\"Orders\"'. Repeatable.",
        ),
    ] = None,
    wait: WaitOption = DEFAULT_WAIT,
    yes: YesOption = False,
) -> None:
    """Remove what install made: slot and publication; triggers and outbox, when no other deployment reads them.

    The log and the state stay: what was taken is kept, queried and delivered as before. If the source is installed
    again, reading goes on there; what changes in between is in no event.
    """
    from evermark.app.inspect import may_have_state

    found = config_at(config)
    chosen, installation = _installation(found, name)
    wait_s = seconds(wait, "--wait")

    def say_of_it(line: str) -> None:
        say(f"{chosen}: {line}")

    if table:
        for line in installation.release(_tables(installation, table), wait_s=wait_s, say=say_of_it):
            say_of_it(line)
        return
    with ExitStack() as stack:
        deployment = stack.enter_context(opened(config)) if may_have_state(found) else None
        kept = deployment.checkpoints.list(chosen) if deployment is not None else {}
        left = installation.left_behind({partition: each.position for partition, each in kept.items()})
        confirm(f"Remove {installation.reader} of {chosen}? {left}", yes=yes)
        if deployment is not None:
            stack.enter_context(held_sources(deployment, [chosen]))
        for line in [*installation.uninstall(wait_s=wait_s, say=say_of_it), left]:
            say_of_it(line)
        if deployment is not None and kept:
            where = deployment.log_folder(chosen)
            say_of_it(
                f"the log at {where} and the state remember what was taken, and stay."
                f" `evermark source install {chosen}` goes on there; what changes until then is in no event."
            )
            say_of_it("to begin anew instead, give the source another name, or the deployment another `data` folder")


@app.command(short_help="Make and drop the daily partitions of the outbox.")
def maintain(name: NameArgument = None, config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Make the outbox's partitions for the days ahead, and drop partitions past `events_retention` that all have read.

    `evermark up` does it every hour. What waits is being written to, or not confirmed by every reader yet.
    """
    found = config_at(config)
    chosen, installation = _installation(found, name)
    with hints_name(found, chosen):
        created, dropped, waiting = installation.maintain()
    row = {"source": chosen, "created": created, "dropped": dropped, "waiting": waiting}
    show([row], tuple(row), as_json=as_json)


app.command(short_help="Copy rows as they are now, beside the stream.")(backfill)
app.command(short_help="Show what is wrong with a source, and choose what to do.")(recover)


def _installation(config: Config, name: str | None) -> tuple[str, Installation]:
    from evermark.sources.kinds import installed_kinds, kind_of

    chosen = known_source(config.sources, name)
    settings = config.sources[chosen]
    found = kind_of(settings, chosen).installation(settings)
    if found is None:
        raise ConfigError(
            f"sources.{chosen}: {settings.type} needs nothing installed",
            hint=f"this is for sources of type {', '.join(installed_kinds())}",
        )
    return chosen, found


def _tables(installation: Installation, names: list[str]) -> list[str]:
    """The tables of the command line, by their whole names."""
    try:
        return [installation.table(name) for name in names]
    except ValueError as error:
        raise typer.BadParameter(printable(str(error)), param_hint="--table") from None


def _remembers(config: Config, name: str) -> bool | None:
    """Whether this deployment has taken events of the source before; none: its state cannot be asked. Makes none."""
    from evermark.app.inspect import existing_state
    from evermark.checkpoints.kinds import open_checkpoints

    try:
        with existing_state(config) as state:
            return state is not None and bool(open_checkpoints(config.reliability.checkpoint, state).list(name))
    except EvermarkError as error:
        say(f"{name}: the deployment's state cannot be asked what it remembers of the source: {error.message}")
        return None
