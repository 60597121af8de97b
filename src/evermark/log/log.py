"""`evermark.Log`: the log as its users see it. No server, no state: a folder of open Delta tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evermark.errors import NotFoundError
from evermark.log.frames import files_frame, where_matches
from evermark.log.kept_table import KeptTable
from evermark.log.read import FileRange, LogReader, moment_of, sources_at, within
from evermark.storage import Url, place_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Log:
    """All events of all sources, for every process that can read the folder."""

    def __init__(self, path: str | Path | Url) -> None:
        self.path = str(path)

    def __repr__(self) -> str:
        return f"Log({self.path!r})"

    def sources(self) -> list[str]:
        return sources_at(place_of(self.path))

    def files(self, source: str | None = None) -> list[FileRange]:
        return [f for name in self._names(source) for f in LogReader(place_of(self.path) / name).files()]

    def read(
        self,
        spark: SparkSession,
        source: str | None = None,
        stream: str | None = None,
        since: str | None = None,
        until: str | None = None,
        batches: tuple[int, int] | None = None,
        where: str | None = None,
    ) -> DataFrame:
        """Events as rows. `since` ≤ event_time < `until`; `batches` = (first, last), both included."""
        moments = (moment_of(since) if since else None, moment_of(until) if until else None)
        files = [f for f in self.files(source) if within(f, *moments)]
        if batches is not None:
            files = [f for f in files if f.batch_max >= batches[0] and f.batch_min <= batches[1]]
        frame = files_frame(spark, [f.path for f in files])
        if stream is not None:
            frame = frame.where(frame["stream"] == stream)
        if moments[0] is not None:
            frame = frame.where(frame["event_time"] >= moments[0])
        if moments[1] is not None:
            frame = frame.where(frame["event_time"] < moments[1])
        if batches is not None:
            frame = frame.where(frame["batch"].between(*batches))
        return where_matches(frame, where) if where else frame

    def table(self, spark: SparkSession, source: str, stream: str, as_of: str | None = None) -> DataFrame:
        """The table the log implies: the newest image of every key that is still there, as of a time.

        A key is gone when its record was deleted, or has another key since. An event without a time counts from when
        it was taken; an event without a key stands for itself. Events that retention removed imply nothing.

        Without `as_of`, what was found is kept beside the log, and the next call reads only what came since: the call
        itself then does that work, and the frame is to be read within the hour.
        """
        self._names(source)
        folder = place_of(self.path) / source
        kept = KeptTable(spark, folder, stream, LogReader(folder).files())
        return kept.table(moment_of(as_of) if as_of is not None else None)

    def _names(self, source: str | None) -> list[str]:
        names = self.sources()
        if source is None:
            return names
        if source not in names:
            raise NotFoundError(
                f"the log at {self.path} has no source {source!r}",
                hint=f"it has {', '.join(names) or 'none yet'}",
            )
        return [source]
