"""Evermark carries events from where they are made to where they are needed, and never loses one.

`import evermark` loads neither Spark nor any driver: names are brought in when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evermark import testing
    from evermark.app.run import Pipeline
    from evermark.errors import EvermarkError
    from evermark.log.log import Log
    from evermark.sources.base import Limit, Slice, Source, Untaken

__all__ = ["EvermarkError", "Limit", "Log", "Pipeline", "Slice", "Source", "Untaken", "testing"]

_HOME = {
    "EvermarkError": "evermark.errors",
    "Limit": "evermark.sources.base",
    "Log": "evermark.log.log",
    "Pipeline": "evermark.app.run",
    "Slice": "evermark.sources.base",
    "Source": "evermark.sources.base",
    "Untaken": "evermark.sources.base",
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("evermark.testing")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'evermark' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
