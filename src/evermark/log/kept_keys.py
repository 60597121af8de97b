"""Whether updates left the keys of their records as they were, seen from the images before and after. Pure.

Where some member has the text of the key in both images, or each member that the key names is the same in both, the
rule for updates that do not tell a key that was left (`_LEFT_KEY` in `implied.py`) concludes nothing.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Most tables have their key first. The value is a text without anything quoted, or a whole number.
_FIRST = r'^(?P<member>\{ *"[^"\\]*" *: *(?:"(?P<text>[^"\\]+)"|(?P<number>-?[0-9]+))) *[,}]'


def all_kept(key: pa.Array, payload: pa.Array, before: pa.Array) -> bool:
    """Whether it is proven of all of them."""
    new, old = pc.extract_regex(payload, _FIRST), pc.extract_regex(before, _FIRST)
    value = pc.binary_join_element_wise(new.field("text"), new.field("number"), "")  # one of them is empty
    same = pc.and_(pc.equal(new.field("member"), old.field("member")), pc.equal(value, key))
    known = pc.and_(pc.and_(pc.is_valid(new), pc.is_valid(old)), same)
    rest = pa.array(np.flatnonzero(~np.asarray(pc.fill_null(known, False).to_numpy(zero_copy_only=False), bool)))
    return all(map(_is_kept, *(column.take(rest).to_pylist() for column in (key, payload, before))))


def _is_kept(key: str, payload: str | None, before: str) -> bool:
    new, old = _members(payload), _members(before)
    if any(value == key and old.get(name) == key for name, value in new.items()):
        return True
    parts = _members(key) if key.startswith("{") else {}
    return bool(parts) and all(name in new and new[name] == value == old.get(name) for name, value in parts.items())


def _members(image: str | None) -> dict[str, Any]:
    """With numbers and other bare words as texts, as Spark's maps have them. Nothing where it is no object."""
    try:
        found = json.loads(image or "", parse_int=str, parse_float=str, parse_constant=str)
    except ValueError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in found.items()}
