"""What `evermark up` would refuse, found beforehand and all at once. Nothing is made, started or connected to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from evermark.app.build import log_place, unfit
from evermark.config import Config
from evermark.config.spark_master import require_master, require_slots
from evermark.errors import ConfigError, EvermarkError
from evermark.log.streams import streams_at, unknown_streams
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.kinds import kind_of
from evermark.storage import Place


def checked(config: Config) -> Iterator[Finding]:
    """A finding for each correct part of the file, and for each fault in the other parts."""
    yield from _sources(config)
    yield _judged("log.path", lambda: _log(config))
    yield _data_folder(config.data)
    yield _judged("spark.master", lambda: _master(config))
    for key, error in config.not_for_a_cluster():
        yield wrong(key, error.message.removeprefix(f"{key}: "), error.hint)
    yield from _subscriptions(config)
    try:
        root = log_place(config)
    except ConfigError:
        return  # said above
    for key, text in file_warnings(config, root):
        yield warning(key, text, "correct it, if it is a slip; a stream that begins later is fine")


def stream_warnings(config: Config, log_root: Place, wanted: Iterable[str]) -> list[str]:
    """A sentence for each of these streams that nothing is known of. A stream may begin later: they are no errors.

    A log in an object store is not looked through: it may be far away, or not there.
    """
    asked = list(wanted)
    if not asked or not isinstance(log_root, Path):
        return []
    logged = streams_at(log_root)
    named = [settings.streams_named() for settings in config.sources.values()]
    if logged is None or (not logged and not all(named)):
        return []  # too much to look through, or nothing to compare with yet
    return unknown_streams(asked, sorted(logged.union(*named)))


def file_warnings(config: Config, log_root: Place) -> Iterator[tuple[str, str]]:
    """Settings that are allowed and probably not meant: the key in the file, and a sentence."""
    wanted = {
        f"{section}.{name}.streams": each.streams
        for section, named in (("subscriptions", config.subscriptions), ("bots", config.bots))
        for name, each in named.items()
        if each.streams
    }
    # Looked up once for all of them.
    said = {
        text.split(":")[0]: text for text in stream_warnings(config, log_root, [s for w in wanted.values() for s in w])
    }
    for key, streams in wanted.items():
        for stream in streams:
            if text := said.get(f"stream {stream}"):
                yield key, text


def _sources(config: Config) -> Iterator[Finding]:
    told = ", ".join(f"{name} ({settings.type})" for name, settings in sorted(config.sources.items()))
    none = wrong("sources", "there is none", "name at least one; `evermark init` writes an example")
    yield ok("sources", told) if told else none
    for name, settings in sorted(config.sources.items()):
        try:
            kind_of(settings, name).require(settings, name)
        except ConfigError as error:
            yield wrong(f"sources.{name}", error.message.removeprefix(f"sources.{name}: "), error.hint)


def _judged(check: str, look: Callable[[], str]) -> Finding:
    try:
        return ok(check, look())
    except EvermarkError as error:
        return wrong(check, error.message.removeprefix(f"{check}: "), error.hint)


def _log(config: Config) -> str:
    place = log_place(config)
    return f"the folder {place}" if isinstance(place, Path) else f"{place}, which is not asked just now"


def _master(config: Config) -> str:
    require_master(config.spark.master, config.spark.conf)
    require_slots(config.spark.master, config.spark.conf, config.spark.lanes, config.spark.cores)
    return config.spark.conf.get("spark.master", config.spark.master)


def _data_folder(folder: Path) -> Finding:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return wrong(
            "data", f"{there} is not a folder that this user may write to", "change its owner, or name another"
        )
    return ok("data", f"the folder {folder}" + ("" if there == folder else ", which `evermark up` makes"))


def _subscriptions(config: Config) -> Iterator[Finding]:
    faults = list(unfit(config, config.sources))
    yield from (wrong(where, error.message, error.hint) for where, error in faults)
    for section, named in (("subscriptions", config.subscriptions), ("bots", config.bots)):
        if named and not any(where.startswith(f"{section}.") for where, _ in faults):
            yield ok(section, ", ".join(sorted(named)[:20]) + (", …" if len(named) > 20 else ""))
