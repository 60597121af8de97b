"""Large values that an update left out, taken from the image that the record had before it.

A source of mode tables is not sent a large value that did not change. The event then lacks the column, with the flag
`unknown:<column>`; the table that the log implies has the value. Images of a record stand under its key, and, from a
change of its key on, under the new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from evermark.event import UNKNOWN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LACKS = f"exists(flags, flag -> startswith(flag, '{UNKNOWN}'))"

# Keys under which images of a record stand that had another key before, or has another since.
_CROSSED = f"""
select distinct stream, partition, explode(array(key, previous_key)) as row_key, true as crossed
from {{events}} where {LACKS} and previous_key is not null
"""


def with_large_values(spark: SparkSession, marks: DataFrame, events: DataFrame) -> DataFrame:
    """The marks that `implied.py` made of the events, with whole payloads where an image from before has what they
    lack. A value that no image has stays absent.

    Marks may say of a row that is kept: `is_kept`, with its image in `kept`.
    """
    crossed = spark.sql(_CROSSED, events=events)
    placed = marks.join(crossed, ["stream", "partition", "row_key"], "left").selectExpr(
        *marks.columns, "crossed", "if(crossed, null, row_key) as alone"
    )
    # One task has all keys that share records; all others are side by side. A mark that says that a key was left is
    # told after the image under the new key, which is of the same event.
    in_order = placed.repartition("stream", "partition", "alone").sortWithinPartitions(
        "stream", "partition", "alone", "batch", "position", "moved"
    )
    return in_order.mapInArrow(filling(), in_order.schema).drop("crossed", "alone")


def filling() -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does with marks in their order. Functions inside of functions are sent to Spark's workers as they
    stand: the workers need not have this program.
    """
    filled, prefix = _merging(), UNKNOWN
    names = ("stream", "partition", "alone", "row_key", "previous_key", "gone", "moved", "flags", "payload")

    def nothing(batch: pa.RecordBatch) -> list[None]:
        return [None] * batch.num_rows

    def fill(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        group: tuple[object, ...] | None = None
        standing: dict[str, str | None] = {}
        for batch in batches:
            columns = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in names]
            # Of a table that is kept; not there where it is made of all events.
            dropped, is_kept, kept = (
                batch.column(at).to_pylist() if (at := batch.schema.get_field_index(name)) >= 0 else nothing(batch)
                for name in ("dropped", "is_kept", "kept")
            )
            payloads = columns[-1]
            for number, row in enumerate(zip(*columns, strict=True)):
                stream, partition, alone, row_key, left_key, gone, moved, flags, payload = row
                if (stream, partition, alone) != group:
                    group, standing = (stream, partition, alone), {}
                if is_kept[number]:
                    standing[row_key] = kept[number]
                if is_kept[number] or dropped[number]:
                    continue
                lacks = [flag[len(prefix) :] for flag in flags or () if flag.startswith(prefix)]
                earlier = standing.get(row_key if left_key is None else left_key)
                if lacks and not moved and not gone and payload is not None and earlier is not None:
                    payload = payloads[number] = filled(payload, earlier, lacks)
                standing[row_key] = None if gone or moved else payload
            at = batch.schema.get_field_index("payload")
            kind = batch.schema.field(at)
            yield batch.set_column(at, kind, pa.array(payloads, kind.type))

    return fill


def _merging() -> Callable[[str, str, Sequence[str]], str]:
    """A payload with the columns that it lacks, out of an earlier one: texts, so that every digit stays as it is."""
    tokens = r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]'

    def members(text: str) -> Iterator[tuple[str, str]]:
        """Names and values of an object, as they are written."""
        at, depth, colon = 1, 0, -1
        for token in re.finditer(tokens, text, re.DOTALL):
            found = token[0]
            if depth == 1 and colon < 0 and found[0] == '"':
                colon = token.end()
            elif depth == 1 and colon > 0 and found in ",}":
                yield text[at:colon].strip(), text[colon + 1 : token.start()].strip()
                at, colon = token.end(), -1
            depth += (found in "[{") - (found in "]}")

    def filled(payload: str, earlier: str, lacks: Sequence[str]) -> str:
        """In the order of the earlier image: columns are added at the end, and none is moved."""
        now, before = dict(members(payload)), dict(members(earlier))
        wanted = {name for name in before if json.loads(name) in lacks and name not in now}
        order = [name for name in before if name in now or name in wanted]
        order += [name for name in now if name not in before]
        return "{" + ",".join(f"{name}:{before[name] if name in wanted else now[name]}" for name in order) + "}"

    return filled
