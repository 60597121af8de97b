"""The contract of storage over its adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.storage import Place
from evermark.testing.contracts.storage import StorageContract


class TestLocalDisk(StorageContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Place:
        return tmp_path / "log"


class TestS3(StorageContract):
    @pytest.fixture
    def folder(self, s3_place: Place) -> Place:
        return s3_place / "shop"
