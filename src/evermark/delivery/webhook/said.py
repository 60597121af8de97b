"""What a receiver said with a refusal, without what it had been told: gateways like to repeat headers and paths. Pure.

The reason of a failure is kept in State, logged, and shown to whoever may read, while the values of headers are sealed
and paths of addresses are told to nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from yarl import URL

_HIDDEN = "***"
_CHARS_MIN = 6  # what is shorter stands in other words, too
_TEXTS_MAX = 128  # each refusal is looked through for them, in the loop that all subscriptions share
_TOKEN = re.compile(r"[^\s,;=\"'&/?]{16,}")


class Confided:
    """What a receiver may repeat, and nobody is to read: the values of headers of one's own, and the address."""

    def __init__(self, url: URL, values: Iterable[str]) -> None:
        # A value with its scheme, as Bearer, and without.
        told = [part for value in values for part in (value, value.partition(" ")[2])]
        told += [url.raw_path_qs, url.path_qs, url.raw_path, url.path, url.password or "", *url.query.values()]
        told += [token for text in told for token in _TOKEN.findall(text)]
        texts = list(dict.fromkeys(text for text in told if len(text) >= _CHARS_MIN))[:_TEXTS_MAX]
        self._texts = sorted(texts, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def __repr__(self) -> str:
        return "Confided(***)"

    def hidden_in(self, said: str, *, is_cut: bool) -> str:
        """`is_cut`: there was more of it, so what it ends with may be how something begins."""
        shown = self._any.sub(_HIDDEN, said)
        begun = max((_begun(shown, text) for text in self._texts), default=0) if is_cut else 0
        return shown[: len(shown) - begun] + _HIDDEN if begun else shown


def _begun(said: str, text: str) -> int:
    """With how many characters of `text` it ends, if these are enough to tell."""
    start = said.find(text[:_CHARS_MIN], max(0, len(said) - len(text)))
    while start >= 0 and not text.startswith(said[start:]):
        start = said.find(text[:_CHARS_MIN], start + 1)
    return 0 if start < 0 else len(said) - start
