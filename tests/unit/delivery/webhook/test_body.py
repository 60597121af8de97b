"""The webhook body: exactly the promised shape, whatever the event holds."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evermark.delivery.webhook.body import Rendering, Style, bundle, bundle_id, content_type, delivery_ids, render
from evermark.delivery.webhook.parked_json import row_from_json, row_json, text_of, texts_of
from evermark.errors import FormatError
from evermark.event import EVENT

AT = datetime(2026, 11, 15, 1, 2, 3, 4, tzinfo=UTC)


def events(*rows: dict[str, Any]) -> pa.Table:
    usual = {
        "event_id": "e1", "source": "shop", "partition": 0, "position": "0001", "batch": 7, "stream": "public.orders",
        "key": "42", "op": "update", "tx": "731", "event_time": AT, "ingested_at": AT, "schema_version": 3,
        "payload": '{"id": 42, "total": "99.50"}',
    }  # fmt: skip
    return pa.Table.from_pylist([{**usual, **row} for row in rows], schema=EVENT)


def test_the_body_has_exactly_the_published_shape() -> None:
    """Version 1 of the standard body, key by key and in order."""
    (body,) = render(events({}), Rendering())
    assert list(json.loads(body)["evermark"]) == [
        "v", "id", "source", "stream", "key", "op", "before", "tx", "schema", "position", "historical", "flags",
        "attempt",
    ]  # fmt: skip
    assert json.loads(body) == {
        "type": "public.orders.update",
        "timestamp": "2026-11-15T01:02:03.000004Z",
        "data": {"id": 42, "total": "99.50"},
        "evermark": {
            "v": 1, "id": "e1", "source": "shop", "stream": "public.orders", "key": "42", "op": "update",
            "before": None, "tx": "731", "schema": 3, "position": "0001", "historical": False, "flags": [],
            "attempt": 1,
        },
    }  # fmt: skip


def test_a_changed_key_is_named_where_it_was_changed_and_nowhere_else() -> None:
    """GIVEN a change of a key beside other events WHEN rendered THEN it alone says which key its record left."""
    table = events({"previous_key": '4"1'}, {"event_id": "e2"})
    moved, other = (json.loads(body)["evermark"] for body in render(table, Rendering()))
    assert (moved["key"], moved["previous_key"]) == ("42", '4"1')
    assert list(moved)[4:6] == ["key", "previous_key"]
    assert "previous_key" not in other
    clouds = [json.loads(body) for body in render(table, Rendering(Style.CLOUDEVENTS))]
    assert clouds[0]["evermarkpreviouskey"] == '4"1'
    assert "evermarkpreviouskey" not in clouds[1]
    bundled = json.loads(bundle(render(table, Rendering(replay_id="r1"))))["events"]
    assert [one["evermark"].get("previous_key") for one in bundled] == ['4"1', None]


def test_a_row_parked_before_a_column_was_added_is_rendered_without_it() -> None:
    """GIVEN a parked row that an older program kept WHEN it is read THEN it is a row like any other."""
    kept = json.loads(row_json(events({}), 0))
    del kept["previous_key"]
    assert render(row_from_json(json.dumps(kept)), Rendering()) == render(events({}), Rendering())


def test_payload_and_before_are_carried_as_they_were_written() -> None:
    """Big numbers, spacing and key order reach the receiver unchanged."""
    payload = '{ "b": 12345678901234567890.10, "a": 1e400 }'
    (body,) = render(events({"payload": payload, "before": "[1 ]"}), Rendering())
    assert payload.encode() in body
    assert b'"before":[1 ]' in body


texts = st.text(st.characters(codec="utf-8"), max_size=12)
moments = st.integers(0, 7 * 10**15).map(lambda us: datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=us))
rows = st.fixed_dictionaries(
    {
        "event_id": texts, "source": texts, "position": texts, "stream": texts, "op": texts,
        "key": st.none() | texts, "tx": st.none() | texts, "previous_key": st.none() | texts,
        "payload": st.none() | st.recursive(st.none() | texts | st.integers(), st.lists, max_leaves=3).map(json.dumps),
        "before": st.none() | texts.map(json.dumps),
        "schema_version": st.none() | st.integers(0, 2**31 - 1),
        "flags": st.none() | st.lists(texts, max_size=2),
        "event_time": st.none() | moments,
    }
)  # fmt: skip


@given(st.lists(rows, min_size=1, max_size=5), st.booleans(), st.integers(0, 2))
def test_every_event_renders_to_json_that_says_what_it_holds(some: list[dict[str, Any]], past: bool, skip: int) -> None:
    """Quotes, control characters, nulls and mixed columns included; slices and parked rows render the same."""
    table = events(*some).slice(min(skip, len(some) - 1))
    how = Rendering(historical=past, attempt=2, replay_id="r1" if past else None)
    bodies = render(table, how)
    for n, (body, row) in enumerate(zip(bodies, some[min(skip, len(some) - 1) :], strict=True)):
        got = json.loads(body)
        meta = got["evermark"]
        for name in ("source", "stream", "op", "key", "tx", "position"):
            assert meta[name] == row[name]
        assert meta.get("previous_key") == row["previous_key"]
        assert meta["id"] == row["event_id"]
        assert got["type"] == f"{row['stream']}.{row['op']}"
        assert got["data"] == (json.loads(row["payload"]) if row["payload"] else None)
        assert meta["before"] == (json.loads(row["before"]) if row["before"] else None)
        assert (meta["schema"], meta["flags"]) == (row["schema_version"], row["flags"] or [])
        assert datetime.fromisoformat(got["timestamp"]) == (row["event_time"] or AT)
        assert meta.get("delivery") == (f"{row['event_id']}.r1" if past else None)
        assert render(row_from_json(row_json(table, n)), how) == [body]
    assert len(json.loads(bundle(bodies))["events"]) == len(bodies)


_MINUTES = st.integers(0, 9_998 * 525_600).map(lambda n: datetime(1, 1, 1, tzinfo=UTC) + timedelta(minutes=n))


@given(_MINUTES, st.lists(st.integers(0, 60_000_000), min_size=1, max_size=5))
@example(AT.replace(second=0, microsecond=0), [0, 60_000_000])
def test_times_are_written_in_full_however_near_they_are(begin: datetime, after_us: list[int]) -> None:
    """GIVEN neighbours of one minute, or not quite THEN each has its own time, with six digits."""
    times = [begin + timedelta(microseconds=us) for us in after_us]
    bodies = render(events(*({"event_time": time} for time in times)), Rendering())
    wanted = [time.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z" for time in times]
    assert [json.loads(body)["timestamp"] for body in bodies] == wanted


def test_names_read_as_numbers_are_written_as_names() -> None:
    """GIVEN columns as the log's files have them, one name for all or several THEN the bodies are the same."""
    for names in (("a", "a", "a"), ("a", 'b"', "a"), ("a", "b", "a")):
        plain = events(*({"stream": name, "op": name, "event_id": f"e{n}"} for n, name in enumerate(names)))
        coded = plain
        for name in ("source", "stream", "op"):
            at = plain.schema.get_field_index(name)
            coded = coded.set_column(at, name, plain.column(name).dictionary_encode())
        for style in Style:
            assert render(coded, Rendering(style)) == render(plain, Rendering(style))
            assert render(coded.slice(1), Rendering(style)) == render(plain.slice(1), Rendering(style))


def test_other_styles_are_json_too() -> None:
    """CloudEvents 1.0 and the bare payload, single and bundled."""
    table = events({}, {"event_id": "e2", "key": None})
    first, _ = bodies = render(table, Rendering(Style.CLOUDEVENTS))
    assert json.loads(first)["specversion"] == "1.0"
    assert json.loads(first)["type"] == "public.orders.update"
    assert [one["id"] for one in json.loads(bundle(bodies, Style.CLOUDEVENTS))] == ["e1", "e2"]
    assert render(table, Rendering(Style.RAW))[0] == b'{"id": 42, "total": "99.50"}'
    assert content_type(Style.CLOUDEVENTS, bundled=True).startswith("application/cloudevents-batch+json")


def test_webhook_ids_are_the_event_ids_and_fit_for_a_header() -> None:
    """Odd ids are encoded, long ones hashed, all stay distinct; a replay has its own."""
    assert delivery_ids(["e1", "e2"]) == ["e1", "e2"]
    assert delivery_ids(["e1"], "r9") == ["e1.r9"]
    odd = delivery_ids(["a\r\nb", "ü", "", "x" * 300, "e1"])
    assert all(one and one.isascii() and one.isprintable() and " " not in one and len(one) <= 256 for one in odd)
    assert len(set(odd)) == 5


def test_a_bundle_has_the_same_id_iff_it_has_the_same_events_in_order() -> None:
    """So that its retry is recognised as a duplicate."""
    assert bundle_id(["a", "b"]) == bundle_id(["a", "b"])
    assert len({bundle_id(ids) for ids in (["a", "b"], ["b", "a"], ["a"], ["ab"], ["ab", ""], ["", "ab"])}) == 6
    assert len({bundle_id(["a"], replay) for replay in (None, "r1", "r2")}) == 3


def test_a_name_that_is_no_text_can_be_compared_still() -> None:
    """GIVEN bytes that are not UTF-8, as they are or read as numbers THEN what is wrong in them is replaced."""
    odd = pa.array([b"a\xff"], pa.binary()).view(pa.string())
    assert text_of(odd[0]) == "a\ufffd"
    assert texts_of(pa.DictionaryArray.from_arrays(pa.array([0, 0]), odd)) == ["a\ufffd"] * 2


def test_a_damaged_parked_row_is_a_format_error() -> None:
    """It names no content."""
    for text in ("", "[]", '{"partition": "x"}', "secret"):
        with pytest.raises(FormatError) as caught:
            row_from_json(text)
        assert "secret" not in str(caught.value)
