"""For tests of your own: the contract suites of all ports. Loads pytest when a suite is first named."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evermark.testing.contracts import (
        CheckpointContract,
        DeliveryContract,
        HeadContract,
        LeaseContract,
        LogContract,
        ParkedContract,
        RegistrationContract,
        SourceContract,
    )

__all__ = [
    "CheckpointContract",
    "DeliveryContract",
    "HeadContract",
    "LeaseContract",
    "LogContract",
    "ParkedContract",
    "RegistrationContract",
    "SourceContract",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'evermark.testing' has no attribute {name!r}")
    return getattr(importlib.import_module("evermark.testing.contracts"), name)
