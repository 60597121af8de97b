"""Which streams the log has events of, and a sentence for a stream that it does not know."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import pyarrow.compute as pc

from evermark.log.opened import columns_of
from evermark.log.read import LogReader, sources_at
from evermark.settings.problems import nearest
from evermark.storage import Place

_LOOK_S_MAX = 2.0
_LISTED_MAX = 10


def streams_at(
    root: Place, look_s_max: float = _LOOK_S_MAX, clock: Callable[[], float] = time.monotonic
) -> set[str] | None:
    """The streams of all sources' logs under `root`; None if it would take longer than `look_s_max` to say."""
    found: set[str] = set()
    end = clock() + look_s_max
    for source in sources_at(root):
        for file in reversed(LogReader(root / source).files()):
            if clock() > end:
                return None
            # Streams are kept as a dictionary, so this reads a few bytes an event.
            column = columns_of(file.path, ["stream"], read_dictionary=["stream"])["stream"]
            found.update(pc.unique(column).to_pylist())
    return found


def unknown_streams(wanted: Iterable[str], known: Sequence[str]) -> list[str]:
    """A sentence for each wanted stream that is not known, with the stream that was probably meant."""
    said = []
    for stream in dict.fromkeys(wanted):
        if stream in known:
            continue
        meant = _meant(stream, known)
        listed = f"known are {', '.join(sorted(known)[:_LISTED_MAX])}{', …' if len(known) > _LISTED_MAX else ''}"
        hint = f"did you mean {meant}?" if meant else listed if known else "none is known yet"
        said.append(
            f"stream {stream[:200]}: the log has no event of it yet, and the file has no table of this name; {hint}"
        )
    return said


def _meant(stream: str, known: Sequence[str]) -> str | None:
    """`orders` for `public.orders`, `public.ordres` for `public.orders`."""
    by_table: dict[str, list[str]] = {}
    for each in known:
        by_table.setdefault(each.rpartition(".")[2].lower(), []).append(each)
    table = stream.rpartition(".")[2].lower()  # alone: a schema that both have makes no two tables alike
    found = by_table.get(table) or by_table.get(nearest(table, by_table) or "", [])
    return found[0] if len(found) == 1 else None
