"""Stores outside State are tried without one: whose the keys in etcd are is another test's (test_etcd_leases.py)."""

from __future__ import annotations

import importlib.util

import pytest

IDENTITY = "the state of these tests"


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> str:
    if importlib.util.find_spec("etcd3gw") is not None:
        monkeypatch.setattr("evermark.checkpoints.etcd.identity_of", lambda _: IDENTITY)
    return IDENTITY
