"""The client of etcd, which threads share."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("etcd3gw", reason="no etcd3gw: the client of etcd is not tested. pip install '.[etcd]'")

from evermark.etcd.client import EtcdClient
from evermark.etcd.settings import EtcdConfig

PORTS = range(1, 4)


def test_who_asks_while_another_thread_has_its_answer_finds_all_endpoints() -> None:
    """GIVEN a client that threads share WHEN one of them has its answer, and the endpoints are put in order THEN at
    each moment of that another finds all of them: a list that is being sorted would be empty for it."""
    given = {"endpoints": [f"http://127.0.0.1:{port}" for port in PORTS]}
    client = EtcdClient(EtcdConfig.model_validate(given), "cluster.leases.etcd")
    found: list[int] = []
    sys.setprofile(lambda *_: found.append(len(client._clients)))  # at each call, where threads may take turns
    try:
        client.ask("asking", lambda each: each.base_url)
    finally:
        sys.setprofile(None)
    assert set(found) == {len(PORTS)}
