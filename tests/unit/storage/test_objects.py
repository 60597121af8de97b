"""An object store whose keys are replaced while a process runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.errors import DeniedError
from evermark.secrets import KeyRef
from evermark.storage import objects, place_of
from evermark.storage.access import Access

PLACE = place_of("s3://acme/shop")


class RefusedError(Exception):
    """As the library's: its text has the status in it."""


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The bucket takes one pair of keys; the files that name it may be written anew."""
    scene = SimpleNamespace(good="old", opened=0, secret=tmp_path / "secret")
    (tmp_path / "access").write_text("id")
    scene.secret.write_text("old")

    def opened(_root: str, access: Access) -> str:
        scene.opened += 1
        return access.credentials()[1]  # type: ignore[index]

    def get(store: str, _key: str) -> Any:
        if store != scene.good:
            raise RefusedError("Server returned non-2xx status code: 403 Forbidden: ")
        return SimpleNamespace(bytes=lambda: b"events")

    monkeypatch.setattr(objects, "_opened", opened)
    monkeypatch.setattr(objects, "_library", lambda: SimpleNamespace(get=get))
    refs = (KeyRef("file", str(tmp_path / "access")), KeyRef("file", str(scene.secret)))
    scene.store = objects.ObjectStore("s3://acme", Access("http://127.0.0.1:1", None, *refs))
    return scene


def test_keys_that_were_replaced_are_used_without_a_restart(keys: Any) -> None:
    """GIVEN an open store WHEN its key is replaced there and here THEN the next request succeeds."""
    assert keys.store.read(PLACE) == b"events"
    keys.secret.write_text("new")
    assert keys.store.read(PLACE) == b"events"
    assert keys.opened == 1, "as long as the old one is good"
    keys.good = "new"
    assert keys.store.read(PLACE) == b"events"
    assert keys.opened == 2


def test_keys_that_another_thread_has_replaced_meanwhile_are_used(keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a request that is refused with the old key WHEN another thread has taken the new one until then THEN the
    request is asked again with it, and the store is not reopened."""
    keys.good = "new"
    keys.secret.write_text("new")
    get = keys.store._library.get

    def slow(store: str, key: str) -> Any:
        monkeypatch.setattr(keys.store._library, "get", get)
        with ThreadPoolExecutor(1) as others:
            assert others.submit(keys.store.read, PLACE).result(timeout=60) == b"events"
        return get(store, key)

    monkeypatch.setattr(keys.store._library, "get", slow)
    assert keys.store.read(PLACE) == b"events"
    assert keys.opened == 2


def test_a_refusal_with_the_same_keys_is_said_and_asked_once(keys: Any) -> None:
    """GIVEN a key that is no longer good WHEN there is no other THEN that is said, and the store is not reopened."""
    keys.good = "new"
    with pytest.raises(DeniedError, match="the store refused"):
        keys.store.read(PLACE)
    assert keys.opened == 1
