"""The table that the events of one stream imply: step by step, each over the rows that the step before gave.

Within a partition batches are in order, and positions within a batch. Between partitions the commits of one Postgres
history are in order, and the ids of its events within a transaction; and so are the positions of a MongoDB deployment.
All else is ordered by time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_POSTGRES_POSITION = "^[0-9a-f]{24}:[0-9a-f]{16}:[0-9a-f]{8}$"

_MONGO_POSITION = "^[0-9a-f]{16}:[0-9a-f]{8}:[0-9a-f]{2}$"

# An event found while a slot was repaired stands where reading went on, not where it was committed.
_HISTORY = (
    f"case when position rlike '{_POSTGRES_POSITION}' and not array_contains(coalesce(flags, array()), 'recovered')"
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
    f" and position rlike '{_POSTGRES_POSITION}' and not (before <=>"
    " lead(payload) over (partition by partition, key order by batch desc, position desc)) as untold"
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
select partition, history, max(struct(batch, position)) as at, max(made) as made, max(moment) as moment
from {events} where op = 'truncate' group by partition, history
"""
_AFTER_TRUNCATES = """
select /*+ broadcast(t) */ e.* from {events} as e left anti join {truncates} as t on case
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
# another record leaves it. Then the key is not gone: the event before had put another record there.
_WHERE_GONE = """
select * from (
    select *, lead(tx) over by_key as older_tx, lead(gone) over by_key as older_gone,
           lead(payload) over by_key as older_payload
    from {marks} window by_key as (partition by partition, row_key order by batch desc, position desc)
) where not coalesce(moved and older_tx = tx and not older_gone and older_payload <> before, false)
"""

_NEWEST = """
select key, op, payload, event_time, schema_version, event_id, position from (
    select *, row_number() over (
        partition by row_key order by if(one_history, made, null) desc nulls last, event_time desc nulls last, event_id
    ) as newest from (
        select *, count(*) over (partition by row_key) = count(history) over (partition by row_key)
                  and min(history) over (partition by row_key) <=> max(history) over (partition by row_key)
                  as one_history
        from (
            select *, row_number() over (
                partition by partition, row_key order by batch desc, position desc) as newest_here from {marks}
        ) where newest_here = 1
    )
) where newest = 1 and not gone
"""


def implied_table(spark: SparkSession, events: DataFrame) -> DataFrame:
    """One row for each key that is still there: its newest image. `events`: inserts, updates, deletes, copied rows and
    truncates of one stream."""
    placed = events.selectExpr("*", *_PLACED)
    standing = spark.sql(_AFTER_TRUNCATES, events=placed, truncates=spark.sql(_TRUNCATES, events=placed))
    images = standing.selectExpr("*", _UNTOLD).selectExpr("*", *_IMAGES)
    told = images.selectExpr("*", _LEFT_KEY).drop("untold", "new", "old", "parts", "old_values")
    marks = spark.sql(_WHERE_GONE, marks=spark.sql(_MARKS, events=told))
    return spark.sql(_NEWEST, marks=marks)
