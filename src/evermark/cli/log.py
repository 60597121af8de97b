"""`evermark log`: what is kept, asked, and tidied."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.app.scratch import scratch_folder
from evermark.cli.console import confirm, noun, say, show, show_json, show_table
from evermark.cli.deployment import config_at, held_sources, known_source, opened
from evermark.cli.log_tail import tail
from evermark.cli.options import DEFAULT_CONFIG, ConfigOption, JsonOption, YesOption
from evermark.cli.parked import all_parked, in_parts
from evermark.delivery.model import ParkedEvent
from evermark.embedded.java import ensure_java
from evermark.errors import ConfigError, DeniedError, NotFoundError
from evermark.storage import Place

if TYPE_CHECKING:
    from evermark.app.build import Deployment
    from evermark.config import Config
    from evermark.log.forget import Forgotten
    from evermark.log.read import FileRange

app = noun("The log: query it, compact it, have it forget.")

SourceOption = Annotated[str | None, typer.Option("--source", "-s", help="Only this source; by default all.")]


@app.command()
def info(config: ConfigOption = DEFAULT_CONFIG, source: SourceOption = None, as_json: JsonOption = False) -> None:
    """Show files, events, bytes, batches and times of each source. Needs no state and no Spark."""
    from evermark.app.build import log_place
    from evermark.log.read import sources_at

    found = config_at(config)
    root = log_place(found)
    logged = sources_at(root)
    names = logged if source is None else [_logged_source(root, logged, found.sources, source)]
    rows = [{"source": name, **_summary(root / name)} for name in names]
    columns = ("source", "files", "rows", "bytes", "batch_min", "batch_max", "oldest", "newest")
    show(rows, columns, as_json=as_json, empty=f"the log at {root} has nothing yet")


app.command()(tail)


class Engine(StrEnum):
    AUTO = "auto"
    DATAFUSION = "datafusion"
    SPARK = "spark"


@app.command()
def query(
    sql: Annotated[
        str, typer.Argument(metavar="SQL", show_default=False, help="A query. Each source is a table of its name.")
    ],
    config: ConfigOption = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(min=1, max=10_000_000, help="Rows at most.")] = 1000,
    engine: Annotated[
        Engine,
        typer.Option(help="auto: in this process where that gives what Spark gives, else Spark, which starts first."),
    ] = Engine.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document per row, each on its own line.")] = False,
) -> None:
    """Ask the log in Spark SQL.

    For example: evermark log query "select op, count(*) from shop group by op".

    Times are in UTC. Give a computed column a name, as in count(*) as events: each engine makes up its own.
    """
    with _answer(config_at(config), sql, limit, engine) as (columns, rows):
        if as_json:
            for row in rows:
                show_json(dict(zip(columns, row, strict=True)))
        else:
            show_table(columns, list(rows))


Answer = tuple[list[str], Iterator[tuple[Any, ...]]]


@contextmanager
def _answer(config: Config, sql: str, limit: int, engine: Engine) -> Iterator[Answer]:
    """Columns and rows, by the engine that was asked for or is needed."""
    from evermark.app.build import log_place
    from evermark.log.log import Log
    from evermark.log.query import NeedsSpark, require_read
    from evermark.log.query import query as ask

    require_read(sql)
    root = log_place(config)
    if engine is not Engine.SPARK:
        try:
            answer = ask(root, sql, limit, _spark_knows, own_dialect=engine is Engine.DATAFUSION)
        except NeedsSpark as error:
            if engine is Engine.DATAFUSION:
                raise ConfigError(error.message, hint="leave --engine out, or use --engine spark") from None
            say(f"{error.message.removeprefix('query: ')}: asking Spark, which takes some seconds to start")
        else:
            yield answer
            return
    with session(config) as spark:
        from evermark.spark.query import query as ask_spark

        yield ask_spark(spark, Log(root), sql, limit)


def _spark_knows(function: str) -> bool:
    from evermark.spark.query import knows_function

    return knows_function(function)


@app.command()
def compact(config: ConfigOption = DEFAULT_CONFIG, source: SourceOption = None, as_json: JsonOption = False) -> None:
    """Merge small files and clean up, once. A running instance does this by itself."""
    _maintain(config, source, as_json=as_json, retain=False)


@app.command()
def retain(config: ConfigOption = DEFAULT_CONFIG, source: SourceOption = None, as_json: JsonOption = False) -> None:
    """Remove events that are older than log.retention, once. What a subscription still needs stays."""
    _maintain(config, source, as_json=as_json, retain=True)


@app.command()
def forget(
    stream: Annotated[str, typer.Option(help="The stream of the events: a table, a collection.", show_default=False)],
    key: Annotated[list[str], typer.Option(help="A key, as events have it; may be repeated.", show_default=False)],
    config: ConfigOption = DEFAULT_CONFIG,
    source: SourceOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all events of a key from the log, and its parked deliveries. An instance may be running.

    Files that have such events are written anew; the old ones go in an hour. Delete the record at its source first:
    events that come later are kept. A record whose key changed had several: name each of them.
    """
    from evermark.log.forget import Forgotten
    from evermark.log.kept_shelf import forget_kept
    from evermark.log.maintenance import Maintenance
    from evermark.log.read import LogReader, sources_at

    what = Forgotten(stream, frozenset(key))
    with opened(config) as deployment:
        name = _logged_source(deployment.log_root, sources_at(deployment.log_root), deployment.sources, source)
        folder = deployment.log_folder(name)
        events = sum(what.in_file(file) for file in LogReader(folder).files())
        parked = [row for row in all_parked(deployment) if _is_about(row.event, name, what)]
        if events or parked:
            about = f"{events} events of {stream} in {name}, and {len(parked)} parked deliveries"
            confirm(f"Remove {about}? They cannot be brought back.", yes=yes)
        removed = Maintenance(folder).forget(what)
        dropped = in_parts(deployment, parked, deployment.delivery.parked.drop)
        stuck = forget_kept(folder)
    if as_json:
        show_json({"source": name, "stream": stream, "events_removed": removed, "deliveries_dropped": dropped})
    else:
        say(f"{name}: {removed} events of {stream} removed, {dropped} parked deliveries dropped")
    if stuck:
        raise DeniedError(
            f"the kept table in {stuck[0]} cannot be removed, and may hold what was forgotten",
            hint="remove the folder as the user it belongs to; it may be deleted at any time",
        )


@app.command()
def missing(
    config: ConfigOption = DEFAULT_CONFIG,
    source: SourceOption = None,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Take them out of the log for good: there is no copy to put back.")
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """List files that are missing, though the log has them.

    With --give-up they are taken out of it: readers pass over their events from then on, and clients of the live tail
    are told to resync. What the source still has of these events is taken again by `evermark checkpoint reset NAME
    --from resync`. An instance may be running.
    """
    from evermark.log.maintenance import Maintenance
    from evermark.log.read import sources_at

    with opened(config) as deployment:
        name = _logged_source(deployment.log_root, sources_at(deployment.log_root), deployment.sources, source)
        care = Maintenance(deployment.log_folder(name))
        files = care.missing()
        events = sum(file.rows for file in files)
        columns = ("file", "partition", "batch_min", "batch_max", "events", "oldest", "newest")
        show([_of_file(file) for file in files], columns, as_json=as_json, empty=f"{name}: no file is missing")
        if files and give_up:
            confirm(f"Give up {events} events of {name}? No reader gets them any more.", yes=yes)
            # Before readers pass over them: a client of the live tail that passes is told, whatever happens to us here.
            ranges = sorted({(file.partition_min, file.partition_max) for file in files})
            said = f"files of the log with {events} events were given up"
            deployment.recoveries.give_up(name, ranges, said)
            care.give_up(files)
            say(f"{name}: {len(files)} files with {events} events are out of the log")
            say(f"to take what the source still has of them: evermark checkpoint reset {name} --from resync")


def _logged_source(root: Place, logged: Collection[str], in_file: Collection[str], source: str | None) -> str:
    """The source that is meant, of those the log has. One of the file may have nothing in it yet, or no more."""
    if (source is None and not logged) or (source in in_file and source not in logged):
        raise NotFoundError(
            f"the log at {root} has nothing " + ("yet" if source is None else f"of {source}"),
            hint="`evermark up` begins it with the first event; if there was one, is log.path the right place?",
        )
    return known_source(logged if source is None else {*logged, *in_file}, source)


def _of_file(file: FileRange) -> dict[str, Any]:
    return {
        "file": Path(file.path).name,
        "partition": file.partition_min,
        "batch_min": file.batch_min,
        "batch_max": file.batch_max,
        "events": file.rows,
        "oldest": file.event_time_min,
        "newest": file.event_time_max,
    }


def _is_about(event: ParkedEvent, source: str, what: Forgotten) -> bool:
    return (
        event.place.source == source
        and event.stream == what.stream
        and not what.keys.isdisjoint({event.key, event.previous_key} - {None})
    )


def _maintain(path: Path, source: str | None, *, as_json: bool, retain: bool) -> None:
    from evermark.log.maintenance import Maintenance
    from evermark.log.opened import lost
    from evermark.log.read import sources_at

    rows: list[dict[str, Any]] = []
    with opened(path) as deployment:
        logged = [name for name in sources_at(deployment.log_root) if name in deployment.sources]
        names = logged
        if source is not None:
            names = [_logged_source(deployment.log_root, logged, deployment.sources, source)]
        retention = deployment.config.log.retention if retain else None
        for name in names:
            with held_sources(deployment, [name]):
                care = Maintenance(deployment.log_folder(name), retention)
                rows.append({"source": name, **vars(care.run(partial(_passed, deployment, name)))})
                for file in rows[-1]["lost"]:
                    error = lost(str(deployment.log_folder(name) / file))
                    say(f"{name}: {error}")
    if as_json:
        show_json(rows)
        return
    for row in rows:
        done = {what.replace("_", " "): count for what, count in row.items() if isinstance(count, int) and count}
        say(f"{row['source']}: " + (", ".join(f"{what} {count}" for what, count in done.items()) or "nothing to do"))
    if not rows:
        say(f"the log at {deployment.log_root} has nothing yet")


def _passed(deployment: Deployment, source: str) -> dict[int, int]:
    """Per partition, the batch that every reader has passed; none while a replay may need it all."""
    from evermark.delivery.status import least_cursors

    if source in deployment.replays.open_sources():
        return {}
    return least_cursors(deployment.delivery.groups().values(), deployment.delivery.cursors_outside(), source)


def _summary(folder: Place) -> dict[str, Any]:
    """From the table's own statistics; no event is read."""
    from evermark.log.read import LogReader

    files = LogReader(folder).files()
    return {
        "files": len(files),
        "rows": sum(file.rows for file in files),
        "bytes": sum(file.size for file in files),
        "batch_min": min((file.batch_min for file in files), default=None),
        "batch_max": max((file.batch_max for file in files), default=None),
        "oldest": min((file.event_time_min for file in files if file.event_time_min is not None), default=None),
        "newest": max((file.event_time_max for file in files if file.event_time_max is not None), default=None),
    }


@contextmanager
def session(config: Config) -> Iterator[Any]:
    from evermark.config.spark_master import beside_an_instance

    os.environ["JAVA_HOME"] = str(ensure_java(config.data / "java"))
    from evermark.spark.session import make_session

    os.environ["TZ"] = "UTC"  # PySpark hands out times in the zone of this process, and does not say which
    time.tzset()
    scratch = scratch_folder(config.name)
    app_name = f"evermark {config.name} query"
    master, conf = beside_an_instance(config.spark.master, config.spark.conf)
    spark = make_session(app_name, master, scratch, conf, scratch / "spark.log", finds_formats=False)
    try:
        yield spark
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
