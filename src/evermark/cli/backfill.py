"""`evermark source backfill`: rows of a source copied once more, or for the first time; and how far copies are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import printable, say
from evermark.cli.deployment import known_source, opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption
from evermark.cli.recover import NameArgument
from evermark.errors import ConfigError

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.sources.copies import Copy, Copying

COLUMNS = ("copy", "source", "stream", "state", "chunks_left", "chunks", "rows", "asked_by", "tries", "error")
LEFT = "left the file"  # shown as the state of a copy of a table that did
_WHERE_MAX = 10_000


def backfill(
    name: NameArgument = None,
    config: ConfigOption = DEFAULT_CONFIG,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            "--collection",
            "-t",
            metavar="T",
            help="Only this table, written as in SQL, or this collection. Repeatable.",
        ),
    ] = None,
    where: Annotated[
        str,
        typer.Option(
            metavar="CONDITION",
            help="Only rows with this SQL condition, of one table: \"created > '2024'\". Of one collection: a filter in"
            ' JSON, \'{"total": {"$gt": 100}}\'.',
        ),
    ] = "",
    cancel: Annotated[
        str, typer.Option(metavar="COPY", help="End this copy, which `evermark status` names; nothing is asked for.")
    ] = "",
) -> None:
    """Copy rows as they are now, as events with `op = read`, beside the stream and without holding it up.

    The request is noted, and a running instance begins within a second or two; without one, the next `evermark up`
    does. `evermark status` shows how far it is. A copy goes on where it was after a crash.
    """
    with opened(config) as deployment:
        if cancel:
            if name or table or where:
                raise typer.BadParameter("it goes alone", param_hint="--cancel")
            copy = deployment.copies.cancel(cancel)
            say(f"{copy.source}: copy {copy.id} of {printable(copy.stream)} is {copy.error or copy.state}")
            return
        chosen = known_source(deployment.sources, name)
        copying = deployment.sources[chosen].copying()
        if copying is None:
            raise ConfigError(
                f"source {chosen} cannot be copied from",
                hint="this is for sources of type postgres in mode: tables, and of type mongo; of a replica each table"
                " is copied once, with `start: copy` in the file",
            )
        streams = _streams(copying, table or [])
        if not streams:
            raise typer.BadParameter(
                "the file names no collection: name the collection to copy", param_hint="--collection"
            )
        if where and len(streams) != 1:
            raise typer.BadParameter("a condition is for one table: name it with --table", param_hint="--where")
        if len(where) > _WHERE_MAX:
            raise typer.BadParameter(f"at most {_WHERE_MAX} characters", param_hint="--where")
        if where:
            where = _condition(copying, where)
        for stream in streams:
            copy = deployment.copies.request(chosen, stream, where)
            say(f"{chosen}: copy {copy.id} of {printable(stream)} is {copy.state}")
    say("`evermark up` carries it out; `evermark status` shows how far it is")


def copy_rows(deployment: Deployment) -> list[dict[str, Any]]:
    rows = [(copy, summary(copy)) for copy in deployment.copies.listed()]
    return [{**row, "state": LEFT} if _has_left(deployment, copy) else row for copy, row in rows]


def is_open(row: dict[str, Any]) -> bool:
    """Whether a person should see it at a glance."""
    from evermark.sources.copies import CopyState

    return row["state"] not in {CopyState.DONE, LEFT}


def _has_left(deployment: Deployment, copy: Copy) -> bool:
    """Whether nobody wants it any more: the file is without its source or its table. Until it has failed, it may be
    under way in an instance that runs with the file of before."""
    from evermark.sources.copies import CopyState

    source = deployment.sources.get(copy.source)
    if copy.state is not CopyState.FAILED:
        return source is None and copy.state is not CopyState.DONE
    copying = source.copying() if source is not None else None
    return copying is None or not copying.reads(copy.stream)


def summary(copy: Copy) -> dict[str, Any]:
    told = {key: getattr(copy, key) for key in ("source", "stream", "condition", "chunks_left", "chunks", "rows")}
    times = {"made_at": copy.made_at.isoformat(), "changed_at": copy.changed_at.isoformat()}
    asked = {"asked_by": str(copy.asked_by), "state": str(copy.state), "tries": copy.tries, "error": copy.error}
    return {"copy": copy.id, **told, **asked, **times}


def _streams(copying: Copying, names: list[str]) -> list[str]:
    try:
        return [copying.stream(name) for name in names] or list(copying.streams)
    except ValueError as error:
        raise typer.BadParameter(printable(str(error)), param_hint="--table") from None


def _condition(copying: Copying, text: str) -> str:
    try:
        return copying.condition(text)
    except ValueError as error:
        raise typer.BadParameter(printable(str(error)), param_hint="--where") from None
