"""The backends of checkpoints: one line each. A backend is imported when a file names it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from evermark.checkpoints.base import CheckpointStore
from evermark.settings.fields import Duration, Model, NotYet, Whole, between, refusal

if TYPE_CHECKING:
    from evermark.state.connection import State


@dataclass(frozen=True)
class Backend:
    """`opener` is a function, as `module:name`, that makes a `CheckpointStore` of the settings and of State."""

    opener: str
    durable: bool = True  # whether checkpoints outlive the process that saved them, and other processes see them


BACKENDS = {
    "postgres": Backend("evermark.checkpoints.stores:open_in_state"),
    "memory": Backend("evermark.checkpoints.stores:open_in_memory", durable=False),
}
_PLANNED = ("etcd", "mongo")
_EVERY_BATCH = NotYet("nothing reads this key in this version: every batch ends with a checkpoint")


def _registered(name: str) -> str:
    if name in BACKENDS:
        return name
    if name in _PLANNED:
        raise refusal("this checkpoint backend is not in this version", hint="use postgres (the default)")
    raise refusal(f"expected one of {', '.join(BACKENDS)}")


class CheckpointConfig(Model):
    """At the latest every `interval` or `event_count` events, whichever comes first."""

    backend: Annotated[str, AfterValidator(_registered)] = "postgres"
    interval: Annotated[Duration, between(timedelta(milliseconds=10), timedelta(hours=1)), _EVERY_BATCH] = timedelta(
        seconds=5
    )
    event_count: Annotated[Whole, Field(ge=1, le=10_000_000), _EVERY_BATCH] = 1000


def backend_of(settings: CheckpointConfig) -> Backend:
    return BACKENDS[settings.backend]


def open_checkpoints(settings: CheckpointConfig, state: State) -> CheckpointStore:
    """The checkpoints of a deployment, read and saved through `state` where the backend keeps them there."""
    module, _, name = backend_of(settings).opener.partition(":")
    store: CheckpointStore = getattr(importlib.import_module(module), name)(settings, state)
    return store
