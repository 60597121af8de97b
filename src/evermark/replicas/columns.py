"""Rows as Arrow columns, with their versions: read, checked and written a column at a time, never row by row.

An integer column is int64 and a real one float64; every other kind is the canonical text of its values. A tombstone has
no values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import FormatError
from evermark.replicas.digests import RowDigest
from evermark.replicas.event import ORIGIN, Image
from evermark.replicas.values import VALUE_CHARS_MAX, Kind, Table

VERSION_FIELDS = (
    pa.field("record_id", pa.string()),
    pa.field("hlc", pa.int64()),
    pa.field("origin_node_id", pa.string()),
    pa.field("origin_seq", pa.int64()),
    pa.field("is_deleted", pa.bool_()),
)
_TYPES = {Kind.INTEGER: pa.int64(), Kind.REAL: pa.float64()}
NUMBER_MAX = 2**62
# Texts that are canonical at a glance; what is not goes the long way.
_CANONICAL = {
    Kind.BOOLEAN: "^(true|false)$",
    Kind.BYTES: "^([0-9a-f][0-9a-f])*$",
    Kind.NUMERIC: r"^(0|-?[1-9][0-9]{0,40}|-?(0|[1-9][0-9]{0,40})\.[0-9]{0,40}[1-9])$",
}


def value_name(column: str) -> str:
    return f"value {column}"  # no name of a version's field


def type_of(kind: Kind) -> pa.DataType:
    return _TYPES.get(kind, pa.string())


def schema_of(table: Table) -> pa.Schema:
    return pa.schema(
        [*VERSION_FIELDS, *(pa.field(value_name(name), type_of(kind)) for name, kind in table.columns.items())]
    )


def live_rows(table: Table, rows: Sequence[Sequence[Any]], hint: str) -> pa.Table:
    """From rows of hlc, origin, number and the table's columns, as SQL gave them."""
    hlc, origin, seq, *values = zip(*rows, strict=True) if rows else [()] * (3 + len(table.columns))
    given = dict(zip(table.columns, values, strict=True))
    made = {column: _array(table, column, given[column], None, hint) for column in table.key}
    records = _record_ids(table, made)
    made |= {column: _array(table, column, given[column], records, hint) for column in given if column not in made}
    version = [records, hlc, origin, seq, pa.repeat(pa.scalar(False), len(rows))]
    columns = [_typed(each, field.type) for each, field in zip(version, VERSION_FIELDS, strict=True)]
    columns += [made[column] for column in table.columns]
    return checked(table, pa.Table.from_arrays(columns, schema=schema_of(table)), hint)


def tombstones(table: Table, rows: Sequence[Sequence[Any]]) -> pa.Table:
    """From rows of (record, hlc, origin, number)."""
    fields = [*([row[at] for row in rows] for at in range(4)), [True] * len(rows)]
    columns = [pa.array(each, field.type) for each, field in zip(fields, VERSION_FIELDS, strict=True)]
    columns += [pa.nulls(len(rows), type_of(kind)) for kind in table.columns.values()]
    return pa.Table.from_arrays(columns, schema=schema_of(table))


def checked(table: Table, rows: pa.Table, hint: str) -> pa.Table:
    """Rows in canonical form; refused unless each has a version, a key, and values of the table's kinds."""
    rows = rows.cast(schema_of(table)).combine_chunks()
    _check_versions(table, rows, hint)
    live = rows.filter(pc.invert(rows["is_deleted"]))
    gone = rows.filter(rows["is_deleted"])
    for record in gone["record_id"].to_pylist():
        table.checked_record(record)
    for column, kind in table.columns.items():
        if gone[value_name(column)].null_count != gone.num_rows:
            raise FormatError(f"{table.name}: a deleted row has values", hint=hint)
        at = live.schema.get_field_index(value_name(column))
        made = _canonical(table, column, kind, live.column(at), live["record_id"], hint)
        live = live.set_column(at, live.schema.field(at), made)
    keys = {column: live[value_name(column)] for column in table.key}
    is_whole = not any(each.null_count for each in keys.values())
    if not is_whole or not _all(pc.equal(_record_ids(table, keys), live["record_id"])):
        raise FormatError(f"{table.name}: an image is of another row than its version", hint=hint)
    return pa.concat_tables([live, gone]) if gone.num_rows else live


def images_of(table: Table, rows: pa.Table) -> dict[str, Image]:
    """Live rows by record, each value as its text."""
    columns = []
    for column, kind in table.columns.items():
        values = rows[value_name(column)].to_pylist()
        write = repr if kind is Kind.REAL else str
        columns.append([None if value is None else write(value) for value in values])
    images = (dict(zip(table.columns, row, strict=True)) for row in zip(*columns, strict=True))
    return dict(zip(rows["record_id"].to_pylist(), images, strict=True))


def row_digests(table: Table, rows: pa.Table) -> list[RowDigest]:
    """By record, a digest of the row's version and values."""
    fields = [rows[field.name] for field in VERSION_FIELDS[:4]]
    fields += [rows[value_name(column)] for column in sorted(table.columns)]
    parts = []
    for each in fields:
        text = _typed(each, pa.string())
        size = pc.fill_null(_typed(pc.binary_length(text), pa.string()), "-")  # null is not the empty text
        parts.append(pc.binary_join_element_wise(size, pc.fill_null(text, ""), ":"))
    texts = _typed(pc.binary_join_element_wise(*parts, ","), pa.binary()).to_pylist()
    values = [hashlib.blake2b(text, digest_size=8).digest() for text in texts]
    return list(zip(rows["record_id"].to_pylist(), values, strict=True))


def _typed(values: Any, kind: pa.DataType) -> Any:
    return values.cast(kind) if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, kind)


def _all(values: Any) -> bool:
    return bool(pc.all(values, min_count=0, skip_nulls=False).as_py())


def _array(table: Table, column: str, values: Any, records: Any, hint: str) -> Any:
    kind = table.columns[column]
    try:
        made = pa.array(values) if kind is Kind.INTEGER else _typed(values, type_of(kind))
        if kind is not Kind.INTEGER or made.type in (pa.int64(), pa.null()):  # asked for integers, Arrow would cut 1.5
            return made.cast(type_of(kind))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        pass  # a value that does not fit its column: it is named below, unless another text of it does
    found: list[Any] = []
    for at, value in enumerate(values):
        record = str(value) if records is None else str(records[at])
        text = None if value is None else table.canonical_value(column, str(value), record, hint)
        found.append(text if text is None or kind not in _TYPES else int(text) if kind is Kind.INTEGER else float(text))
    return pa.array(found, type_of(kind))


def _record_ids(table: Table, values: Any) -> Any:
    texts = [_typed(values[column], pa.string()) for column in table.key]
    if len(texts) == 1:
        return texts[0]
    escaped = [pc.replace_substring(pc.replace_substring(each, "\\", "\\\\"), "|", "\\|") for each in texts]
    return pc.binary_join_element_wise(*escaped, "|")


def _check_versions(table: Table, rows: pa.Table, hint: str) -> None:
    said = f"{table.name}: a row of a snapshot has an impossible version"
    if any(rows[field.name].null_count for field in VERSION_FIELDS):
        raise FormatError(said, hint=hint)
    for name in ("hlc", "origin_seq"):
        found = pc.min_max(rows[name]).as_py()
        if rows.num_rows and not 0 < found["min"] <= found["max"] < NUMBER_MAX:
            raise FormatError(said, hint=hint)
    if not all(ORIGIN.fullmatch(origin) for origin in pc.unique(rows["origin_node_id"]).to_pylist()):
        raise FormatError(said, hint=hint)


def _canonical(table: Table, column: str, kind: Kind, values: Any, records: Any, hint: str) -> Any:
    if kind is Kind.INTEGER:
        return values
    if kind is Kind.REAL:
        odd = pc.is_nan(values)
        values = pc.add(values, 0.0)  # -0.0 is 0.0
    else:
        odd = pc.greater(pc.utf8_length(values), VALUE_CHARS_MAX)
        if kind is not Kind.TEXT:
            odd = pc.or_(odd, pc.invert(pc.match_substring_regex(values, _CANONICAL[kind])))
    if not pc.any(odd, min_count=0).as_py():
        return values
    found = values.to_pylist()
    for at in pc.indices_nonzero(pc.fill_null(odd, False)).to_pylist():
        found[at] = table.canonical_value(column, str(found[at]), records[at].as_py(), hint)
    return pa.array(found, values.type)
