"""The checkpoint contract over etcd and MongoDB, on real servers, and what each of them shows an operator."""

from __future__ import annotations

import base64
import json
import pickle
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evermark.checkpoints.base import Checkpoint, CheckpointStore
from evermark.checkpoints.kinds import CheckpointConfig, open_checkpoints
from evermark.errors import ConfigError, ConflictError, DeniedError, FormatError, StaleError, UnreachableError
from evermark.secrets import KeyRef, SecretBox
from evermark.state.connection import State
from evermark.testing.contracts import CheckpointContract
from evermark.testing.etcds import Etcd, etcd_server
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.servers import free_port
from evermark.testing.until import until

NOWHERE = State(lambda: "host=127.0.0.1 port=1", "evermark_shop")


def opened(**given: Any) -> CheckpointStore:
    return open_checkpoints(CheckpointConfig.model_validate(given), NOWHERE)


def etcd_settings(etcd: Etcd, **more: Any) -> dict[str, Any]:
    return {"backend": "etcd", "etcd": {"endpoints": etcd.url, "prefix": f"/{secrets.token_hex(6)}/", **more}}


class OutsideContract(CheckpointContract):
    """What stores outside State promise beyond the contract: two of them on one server agree."""

    @pytest.fixture
    def settings(self) -> dict[str, Any]:
        raise NotImplementedError("override this fixture with the settings of an empty store")

    @pytest.fixture
    def store(self, settings: dict[str, Any]) -> CheckpointStore:
        return opened(**settings)

    def test_two_stores_agree(self, settings: dict[str, Any], store: CheckpointStore) -> None:
        """GIVEN a save that another process replaced WHEN the first goes on from its own memory THEN the store decides
        by what it holds."""
        other = opened(**settings)
        store.save("shop", 0, Checkpoint("0001", 1, 1))
        other.save("shop", 0, Checkpoint("0005", 5, 1))
        with pytest.raises(ConflictError):
            store.save("shop", 0, Checkpoint("0003", 3, 1))
        store.save("shop", 0, Checkpoint("0006", 6, 1))
        other.save("shop", 0, Checkpoint("0007", 7, 2))
        with pytest.raises(StaleError):
            store.save("shop", 0, Checkpoint("0008", 8, 1))
        assert store.load("shop", 0) == Checkpoint("0007", 7, 2)

    def test_a_save_between_look_and_write_is_not_overwritten(
        self, settings: dict[str, Any], store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GIVEN an owner that looked, and paused WHEN its successor saves meanwhile THEN the late write is refused."""
        rows, other = store._rows, opened(**settings)  # type: ignore[attr-defined]
        look = rows.get

        def look_and_pause(source: str, partition: int) -> Any:
            found = look(source, partition)
            if not later:
                later.append(True)
                other.save("shop", 0, Checkpoint("0009", 9, 2))
            return found

        later: list[bool] = []
        monkeypatch.setattr(rows, "get", look_and_pause)
        with pytest.raises(StaleError):
            store.save("shop", 0, Checkpoint("0002", 2, 1))
        assert store.load("shop", 0) == Checkpoint("0009", 9, 2)


class TestEtcdCheckpoints(OutsideContract):
    @pytest.fixture
    def settings(self, etcd: Etcd) -> dict[str, Any]:
        return etcd_settings(etcd)

    def test_s1_keys_are_partition_n_under_the_prefix(
        self, etcd: Etcd, settings: dict[str, Any], store: CheckpointStore, identity: str
    ) -> None:
        """GIVEN checkpoints WHEN an operator lists etcd's keys THEN they are partition-N under the prefix, in JSON,
        beside one that says for which State they are."""
        for partition in (0, 11):
            store.save("shop", partition, Checkpoint("0001", 1, 3))
        prefix = settings["etcd"]["prefix"]
        listed = json.loads(etcd.control("get", "--prefix", prefix, "-w", "json"))["kvs"]
        found = {base64.b64decode(each["key"]).decode(): json.loads(base64.b64decode(each["value"])) for each in listed}
        assert found.pop(f"{prefix}state") == {"v": 1, "state": identity}
        assert found == {
            f"{prefix}shop/partition-{n}": {"v": 1, "position": "0001", "batch": 1, "epoch": 3} for n in (0, 11)
        }

    def test_without_a_prefix_the_deployment_names_it(self, etcd: Etcd) -> None:
        """GIVEN no prefix THEN two deployments on one etcd do not meet."""
        mine = opened(backend="etcd", etcd={"endpoints": [etcd.url]})
        mine.save("shop", 0, Checkpoint("0001", 1, 1))
        assert "/evermark_shop/checkpoints/shop/partition-0" in etcd.control("get", "--prefix", "", "--keys-only")
        mine.delete("shop", 0)

    def test_an_endpoint_that_is_down_is_passed_over(self, etcd: Etcd) -> None:
        """GIVEN one member that does not answer, and one that does THEN saves and loads go through; with none they are
        refused as unreachable, and the error names the place."""
        dead = f"http://127.0.0.1:{free_port()}"
        given = etcd_settings(etcd)
        given["etcd"]["endpoints"] = [dead, etcd.url]
        store = opened(**given)
        store.save("shop", 0, Checkpoint("0001", 1, 1))
        assert store.load("shop", 0).batch == 1
        with pytest.raises(UnreachableError, match="in etcd at http:"):
            opened(backend="etcd", etcd={"endpoints": dead}).load("shop", 0)

    def test_a_value_that_is_no_checkpoint_is_said(self, etcd: Etcd, settings: dict[str, Any]) -> None:
        """GIVEN a key that something else wrote THEN the error names it."""
        key = f"{settings['etcd']['prefix']}shop/partition-0"
        etcd.control("put", key, "not json")
        with pytest.raises(FormatError, match="partition-0"):
            opened(**settings).load("shop", 0)


class TestMongoCheckpoints(OutsideContract):
    @pytest.fixture
    def settings(self, mongo_server: MongoReplicaSet, mongo_database: str) -> dict[str, Any]:
        return {"backend": "mongo", "mongo": {"url": mongo_server.url, "database": mongo_database}}

    def test_s1_documents_have_the_fields_that_are_asked_for(
        self, mongo_server: MongoReplicaSet, mongo_database: str, store: CheckpointStore
    ) -> None:
        """GIVEN a checkpoint WHEN an operator looks THEN it has `_id`, `token`, `timestamp` and `updated_at`, and the
        times move with each save."""
        store.save("shop", 0, Checkpoint("0001", 1, 3))
        with mongo_server.client() as client:
            rows = client[mongo_database]["checkpoints"]
            first = rows.find_one()
            store.save("shop", 0, Checkpoint("0002", 2, 3))
            second = rows.find_one()
        assert first is not None and second is not None
        assert first.keys() == {"_id", "token", "batch", "epoch", "timestamp", "updated_at"}
        assert (second["_id"], second["token"]) == ("shop/partition-0", "0002")
        assert second["timestamp"] > first["timestamp"]
        assert second["updated_at"] >= first["updated_at"]

    def test_a_server_that_is_down_is_unreachable_and_no_password_is_told(self) -> None:
        """GIVEN no server THEN the error says so, within seconds, without the url."""
        url = f"mongodb://user:hunter2@127.0.0.1:{free_port()}/?serverSelectionTimeoutMS=200"
        with pytest.raises(UnreachableError) as caught:
            opened(backend="mongo", mongo={"url": url}).list("shop")
        assert "hunter2" not in str(caught.value)
        with pytest.raises(ConfigError) as refused:
            opened(backend="mongo", mongo={"url": "mongodb://user:hun/ter2@host/"}).list("shop")
        assert "ter2" not in str(refused.value)


@pytest.fixture
def guarded(etcd_program: None, tmp_path: Path) -> Iterator[Etcd]:
    """An etcd with users: this test's own."""
    with etcd_server(tmp_path / "etcd") as server:
        server.control("user", "add", "root:rootpass")
        server.control("user", "grant-role", "root", "root")
        server.control("user", "add", "evermark:s3cret")
        server.control("role", "add", "marks")
        server.control("role", "grant-permission", "marks", "--prefix=true", "readwrite", "/marks/")
        server.control("user", "grant-role", "evermark", "marks")
        server.control("auth", "enable")
        yield server


def test_s13_a_server_that_hangs_is_given_up_in_its_time(
    etcd_program: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an etcd that takes connections and answers nothing WHEN a checkpoint is saved THEN it is unreachable after
    the time-out; and when it goes on, a save that may have landed after all is repeated without harm."""
    monkeypatch.setattr("evermark.etcd.client.TIMEOUT_S", 0.5)
    with etcd_server(tmp_path / "etcd") as server:
        store = opened(**etcd_settings(server))
        store.save("shop", 0, Checkpoint("0001", 1, 1))
        with server.paused():
            began = time.monotonic()
            with pytest.raises(UnreachableError):
                store.save("shop", 0, Checkpoint("0002", 2, 1))
            assert time.monotonic() - began < 5.0
        until(lambda: reaches(store, Checkpoint("0002", 2, 1)), "it is saved", timeout_s=30)
        assert store.load("shop", 0) == Checkpoint("0002", 2, 1)


def reaches(store: CheckpointStore, checkpoint: Checkpoint) -> bool:
    try:
        store.save("shop", 0, checkpoint)
    except UnreachableError:
        return False
    return True


def test_a_user_logs_in_and_the_password_travels_sealed(guarded: Etcd, tmp_path: Path) -> None:
    """GIVEN an etcd with users WHEN the settings travel to a lane THEN they hold no password in the open, and work
    there; a wrong password, a prefix that is not allowed and a token that ran out are told apart."""
    key = tmp_path / "key"
    key.write_text("a key of more than sixteen bytes")
    box = SecretBox(KeyRef("file", str(key)))
    given = {"endpoints": guarded.url, "prefix": "/marks/", "user": "evermark", "password": "s3cret"}
    settings = CheckpointConfig.model_validate({"backend": "etcd", "etcd": given}).sealed(box)
    travelled = pickle.dumps(settings)
    assert b"s3cret" not in travelled
    store: Any = open_checkpoints(pickle.loads(travelled), NOWHERE)
    store.save("shop", 0, Checkpoint("0001", 1, 1))
    store._rows._etcd._clients[0].session.headers["Authorization"] = "a token that ran out"
    assert store.load("shop", 0) == Checkpoint("0001", 1, 1)

    with pytest.raises(DeniedError):
        opened(backend="etcd", etcd={**given, "password": "wrong"}).load("shop", 0)
    with pytest.raises(DeniedError):
        opened(backend="etcd", etcd={**given, "prefix": "/elsewhere/"}).load("shop", 0)
