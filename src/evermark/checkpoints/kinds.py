"""The backends of checkpoints: one line each. A backend is imported when a file names it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evermark.checkpoints.base import CheckpointStore
from evermark.errors import ConfigError

if TYPE_CHECKING:
    from evermark.config.reliability import CheckpointConfig
    from evermark.state.connection import State


@dataclass(frozen=True)
class Backend:
    """`opener` is a function, as `module:name`, that makes a `CheckpointStore` of the settings and of State."""

    opener: str
    durable: bool = True  # whether checkpoints outlive the process that saved them, and other processes see them


BACKENDS = {
    "postgres": Backend("evermark.checkpoints.postgres:open_checkpoints"),
    "memory": Backend("evermark.checkpoints.memory:open_checkpoints", durable=False),
}


def backend_of(settings: CheckpointConfig) -> Backend:
    found = BACKENDS.get(settings.backend)
    if found is None:
        raise ConfigError(
            f"reliability.checkpoint.backend: {settings.backend} is not in this version",
            hint=f"use one of {', '.join(BACKENDS)}",
        )
    return found


def open_checkpoints(settings: CheckpointConfig, state: State) -> CheckpointStore:
    """The checkpoints of a deployment, read and saved through `state` where the backend keeps them there."""
    module, _, name = backend_of(settings).opener.partition(":")
    store: CheckpointStore = getattr(importlib.import_module(module), name)(settings, state)
    return store
