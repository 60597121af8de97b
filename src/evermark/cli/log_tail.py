"""`evermark log tail`: follow the log, from its own files. No instance has to run, and one that does is not asked."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.cli.console import printable, say, set_by_signals, warn
from evermark.cli.deployment import known_source, opened
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption
from evermark.delivery.model import SourcePartition
from evermark.delivery.tail.place import now
from evermark.errors import ConfigError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import pyarrow as pa

    from evermark.app.build import Deployment
    from evermark.config import Config
    from evermark.delivery.tail.follow import Followed
    from evermark.delivery.tail.wish import BySpark, Wish
    from evermark.log.pieces import LogPiece

_POLL_S = 0.2
_BATCH = "batch:"
_DATA_CHARS_MAX = 200

Session = Callable[["Config"], "AbstractContextManager[Any]"]


def tail(
    config: ConfigOption = DEFAULT_CONFIG,
    source: Annotated[str | None, typer.Option("--source", "-s", help="Only this source; by default all.")] = None,
    stream: Annotated[
        list[str] | None, typer.Option(metavar="STREAM", help="Only events of this stream. Repeatable.")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(metavar="OP", help="Only events of this operation. Repeatable.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="PREDICATE", help="Only events that match, as in a subscription.")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--from", metavar="PLACE", help="Begin at: now, beginning, a time (2026-11-14T12:00Z), or after batch:17."
        ),
    ] = "now",
    follows: Annotated[bool, typer.Option("--follow/--no-follow", help="Wait for more at the end of the log.")] = True,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="End after so many events.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Each event as the body of a webhook, on its line.")] = False,
) -> None:
    """Follow the log: print events as they become durable. Ctrl-C ends it.

    For example: evermark log tail --stream public.orders --where "data.total > 100" --from 2026-11-14
    """
    from evermark.app.tailing import DeploymentTail
    from evermark.cli.log import session
    from evermark.delivery.tail.follow import end_of, follow, started_at
    from evermark.delivery.tail.wish import Wish, require_fit

    wish = Wish(tuple(dict.fromkeys(stream or ())), tuple(dict.fromkeys(op or ())), where)
    require_fit(wish)
    place = _start(start)
    done = threading.Event()
    with opened(config) as deployment, ExitStack() as stack, set_by_signals(done):
        names = deployment.sources if source is None else [known_source(deployment.sources, source)]
        log = DeploymentTail(deployment, deployment.state)
        places = started_at(log, now(*end_of(log, frozenset(names))), place)
        left = limit
        for found in follow(log, frozenset(names), wish, places, _by_spark(deployment, stack, session)):
            if found is None:
                if not follows or done.wait(_POLL_S):
                    break
                continue
            left = _show(found, left, as_json=as_json)
            if left == 0 or done.is_set():
                break


def _start(text: str) -> str | int:
    """`now`, `beginning`, a time, or the number of a batch."""
    from evermark.log.read import moment_of

    if text.startswith(_BATCH):
        number = text.removeprefix(_BATCH)
        if not (number.isascii() and number.isdigit() and len(number) <= 18):
            raise ConfigError(f"--from {printable(text[:80])}: no number of a batch", hint="write it as batch:17")
        return int(number)
    if text not in ("now", "beginning"):
        moment_of(text)
    return text


def _by_spark(deployment: Deployment, stack: ExitStack, session: Session) -> BySpark:
    """Spark is started when it is needed, for a predicate that only Spark can decide."""
    running: list[Any] = []

    def wanted(place: SourcePartition, piece: LogPiece, wish: Wish) -> set[tuple[int, str]]:
        from evermark.spark.tail import wanted_marks

        if not running:
            say("only Spark can say which events match: it is started, which takes some seconds")
            running.append(stack.enter_context(session(deployment.config)))
        return wanted_marks(running[0], place, piece, wish)

    return wanted


def _show(found: Followed, left: int | None, *, as_json: bool) -> int | None:
    """How many more may be shown."""
    for resync in found.resyncs:
        warn(f"{resync.place.source}/{resync.place.partition}: {resync.said}")
    rows = found.rows if left is None else found.rows.slice(0, left)
    for line in _bodies(rows) if as_json else _lines(rows):
        typer.echo(line)
    return None if left is None else left - rows.num_rows


def _bodies(rows: pa.RecordBatch) -> Iterator[str]:
    from evermark.delivery.webhook.body import Rendering, render_sound

    if not rows.num_rows:
        return
    bodies, bad = render_sound(rows, Rendering())
    for number, body in enumerate(bodies.to_pylist()):
        if number in bad:
            warn(f"event {rows.column('event_id')[number].as_py()!r} cannot be rendered: {bad[number]}")
        else:
            yield body.decode().replace("\n", " ").replace("\r", " ")


def _lines(rows: pa.RecordBatch) -> Iterator[str]:
    for row in rows.to_pylist():
        at = row["event_time"] or row["ingested_at"]
        where = f"{row['source']}/{row['partition']} batch {row['batch']}"
        data = " ".join((row["payload"] or "null")[: 4 * _DATA_CHARS_MAX].split())
        data = data if len(data) <= _DATA_CHARS_MAX else f"{data[:_DATA_CHARS_MAX]}…"
        key = "" if row["key"] is None else f" {row['key']}"
        yield printable(f"{at:%Y-%m-%dT%H:%M:%S.%fZ}  {where}  {row['stream']} {row['op']}{key}  {data}")
