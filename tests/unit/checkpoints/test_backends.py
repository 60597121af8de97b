"""A backend of checkpoints is one line: nobody else asks which one a deployment has."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.kinds import BACKENDS, Backend, CheckpointConfig, open_checkpoints
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.errors import SetupError
from evermark.state.connection import State
from tests.unit.config.config_file import MINIMAL, read, refused

NOWHERE = State(lambda: "host=127.0.0.1 port=1", "nowhere")
OPENED: list[str] = []


def open_noted(settings: CheckpointConfig, _: State) -> MemoryCheckpoints:
    OPENED.append(settings.backend)
    return MemoryCheckpoints()


@pytest.mark.parametrize("name", sorted(BACKENDS))
def test_every_registered_backend_is_there_and_may_be_named(name: str) -> None:
    """Each line names a function that opens a store, and the file may name the line."""
    store = open_checkpoints(CheckpointConfig(backend=name), NOWHERE)
    assert all(callable(getattr(store, step)) for step in ("save", "load", "list", "delete"))


def test_one_line_makes_a_backend_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a backend that is refused WHEN its line is added THEN the file is accepted, and the backend opened."""
    text = MINIMAL + "reliability: {checkpoint: {backend: drawer}}\n"
    assert "expected one of postgres, etcd, mongo, memory" in str(refused(tmp_path, text))

    monkeypatch.setitem(BACKENDS, "drawer", Backend(f"{__name__}:open_noted"))
    store = open_checkpoints(read(tmp_path, text).reliability.checkpoint, NOWHERE)
    store.save("shop", 0, Checkpoint("1", 1, 1))
    assert OPENED == ["drawer"]
    assert store.load("shop", 0).batch == 1


def test_a_backend_without_its_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a backend whose driver is not installed THEN the error names the extra that brings it."""
    monkeypatch.setitem(BACKENDS, "etcd", Backend("nowhere:open", driver="no_such_driver"))
    with pytest.raises(SetupError) as refusal:
        open_checkpoints(CheckpointConfig(backend="etcd"), NOWHERE)
    assert refusal.value.hint == "pip install 'evermark[etcd]'"
