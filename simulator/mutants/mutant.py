"""The form of a deliberate bug."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Mutant:
    """`seeds_max`: it must be caught within this many seeds. A module is named where importing it would be a circle."""

    name: str
    what: str
    patches: tuple[tuple[object, str, object], ...]
    seeds_max: int = 60

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, attribute, replacement in self.patches:
                where = importlib.import_module(target) if isinstance(target, str) else target
                stack.enter_context(mock.patch.object(where, attribute, replacement))
            yield
