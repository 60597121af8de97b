"""Whether updates left the keys of their records as they were, seen from the images before and after. Pure.

Where some member has the text of the key in both images, or each member that the key names is the same in both, the
rule for updates that do not tell a key that was left (`_LEFT_KEY` in `implied_table.py`) concludes nothing.

Which members they are is learned of the first updates, which are parsed. Of all others the text is looked at by Arrow,
a tenth of the work. That must never see more than a parser does, so it sees less: what it cannot tell, because a
text has escapes or lies deep, say, is parsed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

# So many updates are parsed, at 35 µs each; of more SQL is quicker.
PARSED_MAX = 50_000
# So many are parsed at a time, to learn of; and so many ways are learned, of which each is a look at all updates.
_SAMPLE = 16
_WAYS_MAX = 4
_NAME_MAX = 63

_SPACE = r"[ \t\n\r]*"
_PLAIN = r'[^"\\\x00-\x1f]'  # a character of a text that stands for itself
_TEXT = rf'"(?:{_PLAIN}|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}))*"'
_NUMBER = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?"
# Objects and arrays that lie so deep in each other are looked through. What is in them need not be JSON: neither this
# nor Spark concludes anything of an image that is none.
_LEVELS = 3
_NESTED = _TEXT
for _ in range(_LEVELS):
    _NESTED = rf'[{{\[](?:[^"{{}}\[\]]|{_TEXT}|{_NESTED})*[}}\]]'
_VALUE = f"(?:{_TEXT}|{_NUMBER}|true|false|null|{_NESTED})"
# A value that has one text, which may be that of a key: without escapes, not null, no object.
_TOLD = f'(?:"(?P<text>{_PLAIN}*)"|(?P<bare>{_NUMBER}|true|false))'

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Way:
    """The key is the value of this member; or it is an object of these members, which the image has, too."""

    names: tuple[str, ...]
    is_object: bool = False


class KeyCheck:
    """Of the updates of one stream; what is learned of some serves for the next. Threads may share it."""

    def __init__(self, parsed_max: int | None = None) -> None:
        self._parsed_max = PARSED_MAX if parsed_max is None else parsed_max
        self._lock = Lock()
        self._ways: list[_Way] = []
        self.parsed = 0

    def all_kept(self, key: pa.Array, payload: pa.Array, before: pa.Array) -> bool:
        """Whether it is proven of all of them; not, if too many would have to be parsed."""
        left = [key, payload, before]
        tried: set[_Way] = set()
        while True:
            for way in [way for way in self._ways if way not in tried]:
                tried.add(way)
                rest = pa.array(~_is_seen(way, *left))
                left = [column.filter(rest) for column in left]
            if not len(left[0]):
                return True
            if not self._learn(*(column.slice(0, _SAMPLE).to_pylist() for column in left)):
                return False
            left = [column.slice(_SAMPLE) for column in left]

    def _learn(self, *columns: list[Any]) -> bool:
        found: Counter[_Way] = Counter()
        for row in zip(*columns, strict=True):
            ways = list(_ways(*row))
            if not ways:
                return False
            found.update(ways)
        with self._lock:
            self.parsed += len(columns[0])
            new = [way for way, _ in found.most_common() if way not in self._ways and all(map(_is_plain, way.names))]
            if new and len(self._ways) < _WAYS_MAX:
                self._ways.append(new[0])
            return self.parsed <= self._parsed_max


def _ways(key: str, payload: str | None, before: str) -> Iterable[_Way]:
    """In which it is proven that this update kept its key."""
    new, old = members(payload), members(before)
    for name, value in new.items():
        if value == key and old.get(name) == key:
            yield _Way((name,))
    parts = members(key) if key.startswith("{") else {}
    if parts and all(name in new and new[name] == value == old.get(name) for name, value in parts.items()):
        yield _Way(tuple(parts), is_object=True)


def members(image: str | None) -> dict[str, Any]:
    """With numbers and other bare words as texts, as Spark's maps have them. Nothing where it is no object."""
    try:
        found = json.loads(image or "", parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in found.items()}


def _is_plain(name: str) -> bool:
    """Whether a text that has no escapes writes the name as it is."""
    return name.isprintable() and not {'"', "\\"} & set(name) and len(name) <= _NAME_MAX


def _is_seen(way: _Way, key: pa.Array, payload: pa.Array, before: pa.Array) -> Mask:
    """Of which updates it is seen without parsing that this way proves that they kept their key."""
    values = _object_values(key, way.names) if way.is_object else [key]
    seen = np.ones(len(key), bool)
    for name, value in zip(way.names, values, strict=True):
        for image in (payload, before):
            same = pc.equal(_value_of(name, image), value)
            seen &= np.asarray(pc.fill_null(same, False).to_numpy(zero_copy_only=False), bool)
    return seen


def _object_values(key: pa.Array, names: tuple[str, ...]) -> list[pa.Array]:
    """Of keys that are objects of just these members, in this order; null for others."""
    members = [
        f'"{re.escape(name)}"{_SPACE}:{_SPACE}'
        + _TOLD.replace("<text>", f"<text{at}>").replace("<bare>", f"<bare{at}>")
        for at, name in enumerate(names)
    ]
    between = f"{_SPACE},{_SPACE}"
    found = pc.extract_regex(key, f"^{_SPACE}{{{_SPACE}{between.join(members)}{_SPACE}}}{_SPACE}$")
    return [_one_of(found, f"text{at}", f"bare{at}") for at in range(len(names))]


def _value_of(name: str, images: pa.Array) -> pa.Array:
    """The text of a member's value, where it has one and the image is seen to have the member just once; else null.

    The image is cut where the name stands first in quotes. Whole members alone may stand before: then it is the name of
    a member, and of none that lies deeper. Members of other names alone may follow: of two of a name the last counts.
    """
    pieces = pc.split_pattern(images, f'"{name}"', max_splits=1)
    begins = pieces.offsets.to_numpy()
    is_whole = np.diff(begins) < 2
    before = pieces.values.take(pa.array(begins[:-1], mask=is_whole))
    after = pieces.values.take(pa.array(begins[:-1] + 1, mask=is_whole))
    told = pc.extract_regex(after, f"^{_SPACE}:{_SPACE}{_TOLD}")
    colon = f"{_SPACE}:{_SPACE}{_VALUE}{_SPACE}"
    is_member = pc.match_substring_regex(before, f"^{_SPACE}{{{_SPACE}(?:{_TEXT}{colon},{_SPACE})*$")
    is_last = pc.match_substring_regex(after, f'^{colon}(?:,{_SPACE}"{_other_than(name)}"{colon})*}}{_SPACE}$')
    return pc.if_else(pc.and_(is_member, is_last), _one_of(told, "text", "bare"), pa.scalar(None, pa.string()))


def _other_than(name: str) -> str:
    """A pattern of all other names that have no escapes."""
    pattern = f"{_PLAIN}+"  # the name goes on
    for each in map(re.escape, reversed(name)):
        other = _PLAIN.replace("[^", f"[^{each}")
        pattern = f"(?:|{other}{_PLAIN}*|{each}{pattern})"  # ends here, goes another way, or the same
    return pattern


def _one_of(found: pa.StructArray, *names: str) -> pa.Array:
    """The one group that is not empty; null where nothing was found."""
    joined = pc.binary_join_element_wise(*(found.field(name) for name in names), "")
    return pc.if_else(pc.is_valid(found), joined, pa.scalar(None, pa.string()))
