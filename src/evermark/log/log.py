"""`evermark.Log`: the log as its users see it. No server, no state: a folder of open Delta tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from evermark.errors import NotFoundError
from evermark.log.frames import files_frame, where_matches
from evermark.log.read import FileRange, LogReader, moment_of, sources_at, within

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Within a partition batches are in order and positions are within a batch; between partitions only time tells.
_NEWEST_BY_KEY = """
select key, op, payload, event_time, schema_version, event_id, position from (
  select *, row_number() over (partition by row_key order by event_time desc nulls last, event_id) as newest from (
    select *, row_number() over (partition by partition, row_key order by batch desc, position desc) as newest_here
    from (select *, coalesce(key, event_id) as row_key from {events})
  ) where newest_here = 1
) where newest = 1 and op <> 'delete'
"""

# A truncate ends what stands before it in its partition.
_AFTER_TRUNCATE = """
select events.* from {events} as events
left join (
  select partition, max(struct(batch, position)) as at from {events} where op = 'truncate' group by partition
) as truncated on events.partition = truncated.partition
where events.op <> 'truncate' and (at is null or struct(events.batch, events.position) > at)
"""


class Log:
    """Every event there is, readable by anybody who can read the folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)

    def __repr__(self) -> str:
        return f"Log({self.path!r})"

    def sources(self) -> list[str]:
        return sources_at(Path(self.path))

    def files(self, source: str | None = None) -> list[FileRange]:
        return [f for name in self._names(source) for f in LogReader(Path(self.path) / name).files()]

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
        """The table the log implies: the newest image of every key that was not deleted, as of a time.

        An event without a time counts from when it was taken; one without a key stands for itself.
        """
        events = self.read(spark, source=source, stream=stream)
        events = events.where("op in ('insert', 'update', 'delete', 'read', 'truncate')")
        if as_of is not None:
            frame = events.selectExpr("*", "coalesce(event_time, ingested_at) as _at")
            events = frame.where(frame["_at"] <= moment_of(as_of)).drop("_at")
        return spark.sql(_NEWEST_BY_KEY, events=spark.sql(_AFTER_TRUNCATE, events=events))

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
