"""The section of a MongoDB source in the file: what it says, and what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from evermark.app.build import make_source
from evermark.errors import SetupError
from evermark.sources.mongo.settings import MongoSettings
from tests.unit.config.config_file import MINIMAL, read, refused

URL = "mongodb://ann:pa55@db:27017/?replicaSet=rs"


def file_with(more: str) -> str:
    return f'{MINIMAL}sources: {{shop: {{type: mongo, url: "{URL}"{more}}}}}\n'


def test_settings_say_where_and_what(tmp_path: Path) -> None:
    """GIVEN every key WHEN the file is read THEN the target has them, and what is shown has no password."""
    pytest.importorskip("pymongo", reason="no pymongo: no MongoDB source is tested. pip install 'evermark[mongo]'")
    more = (
        ", database: shop, collections: [orders, {name: users, exclude: [password], hash: [a.b]}], partitions: 3,"
        " full_documents: stored, before_images: none, start: oldest"
    )
    settings = read(tmp_path, file_with(more)).sources["shop"]
    assert isinstance(settings, MongoSettings)
    target = settings.target()
    assert target.url.open() == URL
    assert target.collections == ("shop.orders", "shop.users")
    assert (target.partitions, target.after, target.before, target.oldest) == (3, "stored", "none", True)
    assert list(target.hidden) == ["shop.users"]
    assert target.hidden["shop.users"].exclude == ("password",)
    assert settings.streams_named() == {"shop.orders", "shop.users"}
    assert "pa55" not in f"{settings} {settings.listed()} {settings.model_dump()}"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (", url: 5", "expected text"),
        (", collections: [orders]", "expected database.collection"),
        (", database: shop, collections: [orders, orders]", "this collection stands here twice"),
        (", database: shop, collections: [{name: a, exclude: [_id]}]", "_id is the key"),
        (", database: shop, collections: [{name: a, hash: [x..y]}]", "expected a field"),
        (", database: a.b", "database"),
        (", partitions: 17", "partitions"),
        (", database: shop, start: copy", "copy is for collections that the file names"),
        (", full_documents: all", "full_documents"),
        (", full_document: stored", "did you mean full_documents?"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, more: str, told: str) -> None:
    """Every check of a value, one by one; the password is in no message."""
    text = file_with(more).replace(f'url: "{URL}", url:', "url:")
    error = refused(tmp_path, text)
    assert told in str(error)
    assert "pa55" not in str(error)


def test_without_the_driver_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN no pymongo WHEN the source is made THEN the extra is named."""
    found = importlib.util.find_spec
    config = read(tmp_path, file_with(""))

    def hidden(name: str, *more: Any) -> Any:
        return None if name == "pymongo" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(SetupError, match="needs pymongo") as error:
        make_source(config, "shop", None)
    assert "evermark[mongo]" in error.value.hint
