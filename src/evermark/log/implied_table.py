"""The tables that events imply, one for each stream: step by step, each over the rows that the step before gave.

Within a partition batches are in order, and positions within a batch. Between partitions the commits of one Postgres
history are in order, and the ids of its events within a transaction; and so are the positions of a MongoDB deployment.
All else is ordered by time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from evermark.log.format import KEPT
from evermark.log.frames import KEPT_SCHEMA
from evermark.log.large_values import LACKS, with_large_values

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLE = ("key", "op", "payload", "event_time", "schema_version", "event_id", "position")

POSTGRES_POSITION = "^[0-9a-f]{24}:[0-9a-f]{16}:[0-9a-f]{8}$"

_MONGO_POSITION = "^[0-9a-f]{16}:[0-9a-f]{8}:[0-9a-f]{2}$"

# An event found while a slot was repaired stands where reading went on, not where it was committed.
_HISTORY = (
    f"case when position rlike '{POSTGRES_POSITION}' and not array_contains(coalesce(flags, array()), 'recovered')"
    f" then substring(position, 1, 24) when position rlike '{_MONGO_POSITION}' then 'mongo' end as history"
)
_PLACED = (
    _HISTORY,
    "struct(substring(position, 1, 41) as commit, event_id) as made",
    "coalesce(event_time, ingested_at) as moment",
)

# Only updates that our trigger wrote before it recorded the previous key: their key is made of their payload.
# Most updates found the row as the event before left it under the same key: they changed no key, and need no look.
_UNTOLD = (
    "op = 'update' and previous_key is null and key is not null and schema_version is not null"
    f" and position rlike '{POSTGRES_POSITION}' and not (before <=>"
    " lead(payload) over (partition by stream, partition, key order by batch desc, position desc)) as untold"
)
_IMAGES = (
    "if(untold, from_json(payload, 'map<string,string>'), null) as new",
    "if(untold, from_json(before, 'map<string,string>'), null) as old",
    "if(untold and key like '{%', from_json(key, 'map<string,string>'), null) as parts",
    "if(untold and key like '{%', from_json(before, 'map<string,variant>'), null) as old_values",
)
# One key column: it has the text of the key. If several columns have it, they must agree on their former value.
# Texts that Spark and Postgres write in two ways (1.50 and 1.5, the spaces of an object) prove nothing.
_LEFT_SINGLE = "array_distinct(transform(map_keys(map_filter(new, (name, value) -> value = key)), name -> old[name]))"
_IS_SINGLE = f"not (key rlike '^-?[0-9]+[.]' or key like '{{%' or key like '[%') and size({_LEFT_SINGLE}) = 1"
# Several: the key is an object that names them, unless it is the text or the object that some column holds.
_IS_COMPOSITE = (
    "size(parts) > 1 and forall(map_keys(parts), name -> map_contains_key(new, name) and map_contains_key(old, name)"
    " and parts[name] = new[name]) and not exists(map_values(new), value -> value like '{%')"
)
_QUOTED = "substring(to_json(array(name)), 2, length(to_json(array(name))) - 2)"
_LEFT_COMPOSITE = (
    "concat('{', array_join(transform(map_keys(parts), name ->"
    f" concat({_QUOTED}, ': ', to_json(old_values[name]))), ', '), '}}')"
)
_LEFT_KEY = (
    f"coalesce(previous_key, nullif(case when new is null or old is null then null when {_IS_SINGLE} then"
    f" {_LEFT_SINGLE}[0] when {_IS_COMPOSITE} then {_LEFT_COMPOSITE} end, key)) as left_key"
)

# A truncate ends all rows before it; with several slots it is in one partition, and ends rows of the others, too.
_TRUNCATES = """
select stream, partition, history, max(struct(batch, position)) as at, max(made) as made, max(moment) as moment
from {events} where op = 'truncate' group by stream, partition, history
"""
_AFTER_TRUNCATES = """
select /*+ broadcast(t) */ e.* from {events} as e left anti join {truncates} as t on t.stream = e.stream and case
    when t.partition = e.partition then t.at > struct(e.batch, e.position)
    when t.history = e.history then t.made > e.made
    else t.moment >= e.moment end
where e.op <> 'truncate'
"""

# What an event says of a key: here is its newest image, or it is gone. One that changed a key says both, of two keys.
_MARKS = """
select e.*, m.row_key, m.gone, m.moved from {events} as e lateral view inline(array_compact(array(
    named_struct('row_key', coalesce(key, event_id), 'gone', op = 'delete', 'moved', false),
    if(left_key is null, null, named_struct('row_key', left_key, 'gone', true, 'moved', true))))) m
"""

# Where a key may be had twice until the transaction ends (a deferrable constraint), one record may take a key before
# another record leaves it. Then the key is not gone: the event before had put another record there. The image before
# the change may be of the key's columns alone; where it is one record, all of them are the same in both.
_IS_OTHER = """
coalesce(if(moved and older_tx = tx and not older_gone and older_payload <> before, coalesce(
    exists(map_entries(from_json(before, 'map<string,string>')), member ->
        map_contains_key(from_json(older_payload, 'map<string,string>'), member.key)
        and not member.value <=> from_json(older_payload, 'map<string,string>')[member.key]), true), false), false)
"""
_OLDER = """
select *, lead(tx) over by_key as older_tx, lead(gone) over by_key as older_gone,
       lead(payload) over by_key as older_payload
from {marks} window by_key as (partition by stream, partition, row_key order by batch desc, position desc)
"""
_WHERE_GONE = f"select * from ({_OLDER}) where not {_IS_OTHER}"

_NEWEST_HERE = """
select * from (
    select *, row_number() over (
        partition by stream, partition, row_key order by batch desc, position desc
    ) as newest_here from {marks}
) where newest_here = 1
"""
_NEWEST = """
select stream, key, op, payload, event_time, schema_version, event_id, position from (
    select *, row_number() over (
        partition by stream, row_key
        order by if(one_history, made, null) desc nulls last, event_time desc nulls last, event_id
    ) as newest from (
        select *, count(*) over of_key = count(history) over of_key
                  and min(history) over of_key <=> max(history) over of_key as one_history
        from {newest_here} window of_key as (partition by stream, row_key)
    )
) where newest = 1 and not gone
"""

# The same in steps, for a table that is kept (`kept_table.py`): rows of KEPT, one for each (partition, row key).
# `keyed` and `raw` are what `_UNTOLD` and `_WHERE_GONE` ask of the events before; null: it is in the newest event.
_KEPT_KEYED = """
select '' as stream, partition, row_key as key, if(keyed is null, payload, keyed.payload) as payload,
       -1L as batch, '' as position, true as is_kept
from {kept} where if(keyed is null, key is not null, keyed.known)
"""
_KEPT_RAW = """
select '' as stream, partition, row_key, if(raw is null, tx, raw.tx) as tx, if(raw is null, gone, raw.gone) as gone,
       if(raw is null, payload, raw.payload) as payload, false as moved, -1L as batch, '' as position, true as is_kept,
       if(gone, null, payload) as kept
from {kept}
"""
_DROPPED = f"select *, {_IS_OTHER} as dropped from ({_OLDER})"
_NEWS = """
select partition, row_key,
       max_by(struct(key, op, if(moved, null, payload) as payload, event_time, schema_version, event_id, position,
                     batch, tx, history, gone, moved), struct(batch, position)) filter (where not dropped) as newest,
       max_by(struct(tx, gone, payload, dropped), struct(batch, position)) as raw,
       max_by(struct(payload), struct(batch, position)) filter (where not moved and key is not null) as keyed
from {marks} group by partition, row_key
"""
_KEPT_NAMES = tuple(name for name in KEPT.names if name not in {"partition", "row_key", "raw", "keyed"})
# Where every new mark of a key was dropped, the event that was the newest still is.
_MERGED = f"""
select n.partition, n.row_key,
       {", ".join(f"if(n.newest is not null, n.newest.{name}, k.{name}) as {name}" for name in _KEPT_NAMES)},
       if(n.raw.dropped, named_struct('tx', n.raw.tx, 'gone', n.raw.gone, 'payload', n.raw.payload), null) as raw,
       case when n.newest is not null and not n.newest.moved and n.newest.key is not null then null
            when n.keyed is not null then named_struct('known', true, 'payload', n.keyed.payload)
            when k.row_key is null then named_struct('known', false, 'payload', cast(null as string))
            when k.keyed is not null then k.keyed
            else named_struct('known', k.key is not null, 'payload', if(k.key is not null, k.payload, null))
       end as keyed
from {{news}} as n left join {{kept}} as k on n.partition = k.partition and n.row_key = k.row_key
"""
# As long as there is one partition, a key without a kept row is answered for as this row would answer.
_FORGETTABLE = "gone and payload is null and raw is null and keyed is null"


def implied_table(spark: SparkSession, events: DataFrame) -> DataFrame:
    """One row for each key that is still there: its newest image. `events`: inserts, updates, deletes, copied rows and
    truncates of one stream."""
    return implied_tables(spark, _of_one_stream(events)).select(*TABLE)


def implied_tables(spark: SparkSession, events: DataFrame) -> DataFrame:
    """The same for the events of many streams, as one query; with `stream`."""
    placed = events.selectExpr("*", *_PLACED)
    standing = spark.sql(_AFTER_TRUNCATES, events=placed, truncates=spark.sql(_TRUNCATES, events=placed))
    marks = spark.sql(_WHERE_GONE, marks=spark.sql(_MARKS, events=_told(standing)))
    if _some_lack(events):
        marks = with_large_values(spark, marks, events)
    return spark.sql(_NEWEST, newest_here=spark.sql(_NEWEST_HERE, marks=marks))


def _of_one_stream(events: DataFrame) -> DataFrame:
    """Streams are told apart in every step: one that is alone needs no name."""
    return events.selectExpr(*("'' as stream" if name == "stream" else f"`{name}`" for name in events.columns))


def _some_lack(events: DataFrame) -> bool:
    """Looked at before all else: of most streams no event lacks a value, and their payloads need not be touched."""
    return bool(events.where(LACKS).select("op").head(1))


def _told(standing: DataFrame) -> DataFrame:
    """With the key that each event took away from its record."""
    images = standing.selectExpr("*", _UNTOLD).selectExpr("*", *_IMAGES)
    return images.selectExpr("*", _LEFT_KEY).drop("untold", "new", "old", "parts", "old_values")


@dataclass(frozen=True)
class Truncates:
    """The last truncate of a partition and history."""

    partition: int
    history: str | None
    batch: int
    position: str
    commit: str
    event_id: str
    moment_us: int


_TRUNCATES_SCHEMA = (
    "partition int, history string, batch bigint, position string, commit string, event_id string, moment_us bigint"
)


def last_truncates(spark: SparkSession, events: DataFrame) -> list[Truncates]:
    found = spark.sql(_TRUNCATES, events=events.selectExpr("*", *_PLACED))
    rows = found.selectExpr("partition", "history", "at.*", "made.*", "unix_micros(moment) as moment_us").collect()
    return [Truncates(**row.asDict()) for row in rows]


def kept_rows(
    spark: SparkSession,
    events: DataFrame,
    truncates: Sequence[Truncates] = (),
    kept: DataFrame | None = None,
    *,
    few: bool = False,
) -> DataFrame:
    """Rows of KEPT for every key that these events speak of, where `kept` has the rows from before them.

    No event may be a truncate, except that `truncates` has it. `few`: the events fit into every task's memory.
    """
    events = _of_one_stream(events)
    standing = events.where("op <> 'truncate'").selectExpr("*", *_PLACED)
    if truncates:
        rows = spark.createDataFrame([tuple(vars(one).values()) for one in truncates], _TRUNCATES_SCHEMA).selectExpr(
            "'' as stream", "partition", "history", "struct(batch, position) as at", "struct(commit, event_id) as made",
            "timestamp_micros(moment_us) as moment",
        )  # fmt: skip
        standing = spark.sql(_AFTER_TRUNCATES, events=standing, truncates=rows)
    # Of `false` Spark knows that it has no rows, and leaves out all that is made of them.
    before = kept if kept is not None else spark.createDataFrame([], KEPT_SCHEMA).where("false")
    asked = _of_keys(before, standing.selectExpr("partition", "key as row_key"), few)
    known = standing.unionByName(spark.sql(_KEPT_KEYED, kept=asked), allowMissingColumns=True)
    marks = spark.sql(_MARKS, events=_told(known).where("is_kept is null"))
    before = _of_keys(before, marks.select("partition", "row_key"), few)
    all_marks = marks.unionByName(spark.sql(_KEPT_RAW, kept=before), allowMissingColumns=True)
    fresh = spark.sql(_DROPPED, marks=all_marks)
    if _some_lack(events):
        fresh = with_large_values(spark, fresh, events)
    news = spark.sql(_NEWS, marks=fresh.where("is_kept is null"))
    return spark.sql(_MERGED, news=news, kept=before).select(*KEPT.names)


def _of_keys(kept: DataFrame, keys: DataFrame, few: bool) -> DataFrame:
    wanted = keys.distinct()
    return kept.join(wanted.hint("broadcast") if few else wanted, ["partition", "row_key"], "left_semi")


def merged_layers(layers: Sequence[DataFrame], *, few: bool, alone: bool) -> DataFrame:
    """Rows of KEPT from several layers, given the oldest first: of each key the row of the newest layer that has it.

    `few`: the layers after the first fit into every task's memory. `alone`: all rows are of one partition.
    """
    first, *later = layers
    if not later:
        return first
    over = later[0]
    if len(later) > 1:
        numbered = [layer.selectExpr("*", f"{number} as layer") for number, layer in enumerate(later)]
        ranked = reduce(lambda some, more: some.unionByName(more), numbered).selectExpr(
            "*", "row_number() over (partition by partition, row_key order by layer desc) as nth"
        )
        over = ranked.where("nth = 1").drop("layer", "nth")
    by = ["row_key"] if alone else ["partition", "row_key"]  # every row of the table is looked up: the less the better
    keys = over.select(*by)
    stays = first.join(keys.hint("broadcast") if few else keys, by, "left_anti")
    return stays.unionByName(over)


def without_forgettable(kept: DataFrame) -> DataFrame:
    """For the lowest layer of a stream that is in one partition."""
    return kept.where(f"not coalesce({_FORGETTABLE}, false)")


def table_of(spark: SparkSession, kept: DataFrame, partitions: int) -> DataFrame:
    """The table, out of the rows of KEPT of all partitions."""
    if partitions > 1:
        made = kept.selectExpr("*", "'' as stream", "struct(substring(position, 1, 41) as commit, event_id) as made")
        return spark.sql(_NEWEST, newest_here=made).select(*TABLE)
    return kept.where("not gone").select(*TABLE)
