"""Large values that an update left out, taken from the image that the record had before it.

A source of mode tables is not sent a large value that did not change. The event then lacks the column, with the flag
`unknown:<column>`; the table that the log implies has the value. Images of a record stand under its key, and, from a
change of its key on, under the new one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from evermark.event import UNKNOWN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LACKS = f"exists(flags, flag -> startswith(flag, '{UNKNOWN}'))"

# The image of a record: as a text, or taken apart into the texts of names and values. That takes long where values are
# large, so it stays apart from one event of the record to the next.
Image: TypeAlias = str | dict[str, str]
# So many characters are given back at a time: of a large value that was left out many rows may have a copy.
PIECE_SIZE = 16 * 1024 * 1024

# Where images of a record stand that had another key before.
_MOVES = f"""
select distinct stream, partition, key, previous_key
from {{events}} where {LACKS} and previous_key is not null and key is not null
"""
# So many moves are told apart, in the memory of the driver. Of more all keys are held by one task of each partition.
_MOVES_MAX = 200_000
_CROSSED = "stream string, partition int, row_key string, shared bigint"


def with_large_values(spark: SparkSession, marks: DataFrame, events: DataFrame) -> DataFrame:
    """The marks that `implied_table.py` made of the events, with whole payloads where an image from before has what
    they lack. A value that no image has stays absent.

    Marks may say of a row that is kept: `is_kept`, with its image in `kept`.
    """
    moves = [tuple(row) for row in spark.sql(_MOVES, events=events).limit(_MOVES_MAX + 1).collect()]
    if len(moves) <= _MOVES_MAX:
        crossed = spark.createDataFrame(shared_keys(moves), _CROSSED).hint("broadcast")
    else:
        all_of_them = "select distinct stream, partition, explode(array(key, previous_key)) as row_key, 0L as shared"
        crossed = spark.sql(f"{all_of_them} from {{moves}}", moves=spark.sql(_MOVES, events=events))
    placed = marks.join(crossed, ["stream", "partition", "row_key"], "left").selectExpr(
        *marks.columns, "shared", "if(shared is null, row_key, null) as alone"
    )
    # One task has all keys that share records; all others are side by side. A mark that says that a key was left is
    # told after the image under the new key, which is of the same event.
    apart = ("stream", "partition", "alone", "shared")
    in_order = placed.repartition(*apart).sortWithinPartitions(*apart, "batch", "position", "moved")
    return in_order.mapInArrow(filling(), in_order.schema).drop("shared", "alone")


def shared_keys(moves: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Stream, partition and key of each key between which records moved, and a number that keys have in common when a
    record may have come from one to the other. `moves`: stream, partition, and the two keys."""
    towards: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def first(place: tuple[Any, ...]) -> tuple[Any, ...]:
        towards.setdefault(place, place)
        while (upper := towards[place]) != place:
            towards[place] = place = towards[upper]  # half the way at each look
        return place

    for stream, partition, key, other in moves:
        towards[first((stream, partition, key))] = first((stream, partition, other))
    numbers: dict[tuple[Any, ...], int] = {}
    return [(*place, numbers.setdefault(first(place), len(numbers))) for place in list(towards)]


def filling() -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a task does with marks in their order. Functions inside of functions are sent to Spark's workers as they
    stand: the workers need not have this program.
    """
    filled, written = merging()
    prefix, size_max = UNKNOWN, PIECE_SIZE
    names = ("stream", "partition", "alone", "shared", "row_key", "previous_key", "gone", "moved", "flags", "payload")

    def nothing(batch: pa.RecordBatch) -> list[None]:
        return [None] * batch.num_rows

    def fill(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        group: list[object] | None = None
        standing: dict[str, Image | None] = {}
        for batch in batches:
            first, size = 0, 0
            columns = [batch.column(batch.schema.get_field_index(name)).to_pylist() for name in names]
            # Of a table that is kept; not there where it is made of all events.
            dropped, is_kept, kept = (
                batch.column(at).to_pylist() if (at := batch.schema.get_field_index(name)) >= 0 else nothing(batch)
                for name in ("dropped", "is_kept", "kept")
            )
            payloads = columns[-1]
            for number, row in enumerate(zip(*columns, strict=True)):
                *of, row_key, left_key, gone, moved, flags, payload = row
                if of != group:
                    group, standing = of, {}
                if is_kept[number]:
                    standing[row_key] = kept[number]
                if is_kept[number] or dropped[number]:
                    continue
                lacks = [flag[len(prefix) :] for flag in flags or () if flag.startswith(prefix)]
                earlier = standing.get(row_key if left_key is None else left_key)
                if lacks and not moved and not gone and payload is not None and earlier is not None:
                    standing[row_key] = filled(payload, earlier, lacks)
                    payloads[number] = written(standing[row_key])
                    size += len(payloads[number])
                else:
                    standing[row_key] = None if gone or moved else payload
                # What was left out is many times as large as what came.
                if size >= size_max:
                    yield with_payloads(batch, payloads, first, number + 1)
                    payloads[first : number + 1] = [None] * (number + 1 - first)
                    first, size = number + 1, 0
            yield with_payloads(batch, payloads, first, batch.num_rows)

    def with_payloads(batch: pa.RecordBatch, payloads: list[str | None], first: int, end: int) -> pa.RecordBatch:
        at = batch.schema.get_field_index("payload")
        kind = batch.schema.field(at)
        return batch.slice(first, end - first).set_column(at, kind, pa.array(payloads[first:end], kind.type))

    return fill


def lacked(flags: Sequence[str] | None) -> list[str]:
    """The columns that an event with these flags lacks."""
    return [flag[len(UNKNOWN) :] for flag in flags or () if flag.startswith(UNKNOWN)]


class Unfinished:
    """Records of one partition whose newest image lacks large values, each with its events from there on, the newest
    first. For tasks that have this program: events are rows of the log as Python has them, with `row_key` and `gone`.
    """

    def __init__(self) -> None:
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._filled, self._written = merging()

    def keys(self) -> list[str]:
        return list(self._events)

    def add(self, events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Events that are older than all that were added before: all that there are of these records in a stretch of
        the log. Returns the newest event of each record that is whole by now."""
        whole: dict[str, dict[str, Any]] = {}
        for event in sorted(events, key=lambda each: (each["batch"], each["position"]), reverse=True):
            key = event["row_key"]
            if key in whole:
                continue
            self._events.setdefault(key, []).append(event)
            if event["gone"] or event["payload"] is None or not lacked(event["flags"]):
                whole[key] = self._whole(self._events.pop(key), None)
        return list(whole.values())

    def filled(self, images: Mapping[str, str | None]) -> list[dict[str, Any]]:
        """The newest event of each of these records, whose images before all events these are, by row key."""
        return [self._whole(self._events.pop(key), image) for key, image in images.items()]

    def rest(self) -> list[dict[str, Any]]:
        """The newest event of each record that is left: none had an image before all events."""
        return self.filled(dict.fromkeys(self._events))

    def _whole(self, events: Sequence[dict[str, Any]], standing: str | None) -> dict[str, Any]:
        """The first of the events, whose payload has what the others tell of what it lacks."""
        image: Image | None = standing
        for event in reversed(events):
            lacks, payload = lacked(event["flags"]), event["payload"]
            if lacks and payload is not None and image is not None and not event["gone"]:
                image = self._filled(payload, image, lacks)
            else:
                image = None if event["gone"] else payload
        return events[0] if events[0]["gone"] else events[0] | {"payload": self._written(image)}


def merging() -> tuple[
    Callable[[Image, Image, Sequence[str]], dict[str, str]],
    Callable[[Image | None], str | None],
]:
    """How a payload gets the columns that it lacks, out of an earlier image, and how what came of it is written. Names
    and values are texts as they stand in the payloads, so that every digit stays as it is.
    """
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

    def filled(payload: Image, earlier: Image, lacks: Sequence[str]) -> dict[str, str]:
        """In the order of the earlier image: columns are added at the end, and none is moved."""
        now, before = (dict(members(image)) if isinstance(image, str) else image for image in (payload, earlier))
        wanted = {name for name in before if name not in now and json.loads(name) in lacks}
        order = [name for name in before if name in now or name in wanted]
        order += [name for name in now if name not in before]
        return {name: before[name] if name in wanted else now[name] for name in order}

    def written(image: Image | None) -> str | None:
        if not isinstance(image, dict):
            return image
        return "{" + ",".join(f"{name}:{value}" for name, value in image.items()) + "}"

    return filled, written
