"""What a person is told of a MongoDB source: by `doctor`, and by errors. Never the password of its url."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from evermark.errors import ConfigError, DeniedError, EvermarkError, SetupError, UnreachableError
from evermark.observe.finding import Finding, Grade
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.kinds import BotReaders, SourceContext
from evermark.sources.mongo.connect import open_client, where
from evermark.sources.mongo.doctor import examined, said_of_version
from evermark.sources.mongo.kind import MongoKind
from evermark.sources.mongo.settings import MongoSettings
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from evermark.testing.mongods import MongoReplicaSet, mongo_replica_set
from evermark.testing.servers import free_port
from evermark.testing.until import until
from tests.contract.mongo.mongo_scene import IMAGES

PASSWORD = "pa55-w0rd"
_NOW = Limit(wait_s=0.0)


def findings(url: str, **more: Any) -> dict[str, Finding]:
    target = MongoTarget(Plain(url), **more)
    client = open_client(target.url)
    try:
        return {finding.check: finding for finding in examined(client, target)}
    finally:
        client.close()


def refused(url: str, **more: Any) -> EvermarkError:
    source = MongoChanges(MongoTarget(Plain(url), **more))
    try:
        with pytest.raises(EvermarkError) as error:
            source.check({})
        assert PASSWORD not in f"{error.value} {error.value.hint}"
        return error.value
    finally:
        source.close()


@pytest.fixture(scope="module")
def guarded(mongod: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoReplicaSet]:
    """A deployment where every user needs a password: `reader` reads one database, `stranger` another one."""
    folder = tmp_path_factory.mktemp("guarded")
    key = folder / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    with mongo_replica_set(folder, arguments=("--keyFile", str(key))) as servers:
        with servers.members[0].direct() as client:
            root = {"pwd": PASSWORD, "roles": ["root"]}
            until(lambda: client.admin.command("hello").get("isWritablePrimary"), "it takes writes")
            client.admin.command("createUser", "root", **root)
        with pymongo.MongoClient[dict[str, Any]](as_user(servers, "root")) as client:
            for name, database in (("reader", "shop"), ("stranger", "other")):
                roles = [{"role": "read", "db": database}]
                client.admin.command("createUser", name, pwd=PASSWORD, roles=roles)
        yield servers


def as_user(servers: MongoReplicaSet, name: str, password: str = PASSWORD) -> str:
    return servers.url.replace("mongodb://", f"mongodb://{name}:{password}@")


def test_a_deployment_that_can_be_read_is_said_to_be_well(mongo_server: MongoReplicaSet, mongo_database: str) -> None:
    """GIVEN a replica set WHEN doctor looks THEN it names the set, and warns of an oplog that is young."""
    found = findings(mongo_server.url, database=mongo_database)
    assert found["server"].grade is Grade.OK and "the replica set evermark" in found["server"].found
    assert found["changes"].grade is Grade.OK
    assert found["version"].grade is Grade.OK
    assert found["oplog"].grade is Grade.WARNING and "replSetResizeOplog" in found["oplog"].mend


def test_a_server_that_cannot_show_documents_as_of_a_time_is_named() -> None:
    """GIVEN versions of the server WHEN they are too old for copies and repairs THEN doctor says so, and calls it wrong
    where the file asks for copies."""
    for version, copies, grade in (
        ("4.4.29", True, Grade.WRONG),
        ("4.4.29", False, Grade.WARNING),
        ("5.0.0", True, Grade.OK),
        ("10.1.0-rc0", True, Grade.OK),
    ):
        assert said_of_version(version, copies=copies).grade is grade, version


def test_what_the_file_wants_decides_how_bad_an_old_server_is(
    mongo_server: MongoReplicaSet, mongo_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a server that is too old WHEN `doctor` looks THEN it is wrong with `start: copy`, else a warning."""
    monkeypatch.setattr(pymongo.MongoClient, "server_info", lambda *_: {"version": "4.4.29"})
    nobody = BotReaders(lambda *_: frozenset(), lambda *_: frozenset(), lambda *_: "")
    context = SourceContext("shop", None, lambda: Plain("x"), "s", nobody)
    for start, grade in (("copy", Grade.WRONG), ("now", Grade.WARNING)):
        given = {"url": mongo_server.url, "database": mongo_database, "collections": ["orders"], "start": start}
        settings = MongoSettings.model_validate(given)
        found = MongoKind().examine(settings, context, None)
        assert {each.check: each.grade for each in found}["version"] is grade


def test_collections_without_images_are_named_with_the_line_to_run(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN settings that ask for images WHEN a collection keeps none THEN it is a warning, or wrong if required."""
    with mongo_server.client() as client:
        client[mongo_database].create_collection("kept", **IMAGES)
        assert findings(mongo_server.url, database=mongo_database, after="stored")["images"].grade is Grade.OK
        client[mongo_database].create_collection("bare")
    found = findings(mongo_server.url, database=mongo_database, after="stored")["images"]
    assert found.grade is Grade.WARNING and 'collMod: "bare"' in found.mend
    assert findings(mongo_server.url, database=mongo_database, after="required")["images"].grade is Grade.WRONG


def test_a_required_image_that_is_missing_stops_with_the_line_to_run(
    mongo_server: MongoReplicaSet, mongo_database: str
) -> None:
    """GIVEN `required` WHEN a document without image changes THEN reading stops, and says what to do."""
    source = MongoChanges(MongoTarget(Plain(mongo_server.url), mongo_database, after="required"))
    with mongo_server.client() as client:
        start = source.earliest(0)
        client[mongo_database]["bare"].insert_one({"_id": 1})
        client[mongo_database]["bare"].update_one({"_id": 1}, {"$set": {"a": 1}})
    end = source.latest({0: start}, _NOW)[0]
    with pytest.raises(SetupError) as error:
        list(source.read(source.slices(0, start, end)[0]))
    source.close()
    assert "collMod" in error.value.hint


def test_a_single_server_is_refused_with_what_to_do(mongod: Path, tmp_path: Path) -> None:
    """GIVEN a mongod outside of a replica set WHEN it is looked at THEN nothing else is asked of it."""
    port = free_port()
    command = [mongod, "--dbpath", tmp_path, "--port", port, "--bind_ip", "127.0.0.1", "--nounixsocket"]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL) as process:
        try:
            url = f"mongodb://127.0.0.1:{port}/"
            error = refused(url)
            assert isinstance(error, SetupError) and "--replSet" in error.hint
            assert findings(url)["server"].grade is Grade.WRONG
        finally:
            process.kill()


def test_a_user_may_read_its_database_and_nothing_else(guarded: MongoReplicaSet) -> None:
    """GIVEN the role `read` WHEN another database or the whole deployment is asked for THEN the grant is named."""
    found = findings(as_user(guarded, "reader"), database="shop")
    assert found["changes"].grade is Grade.OK
    assert found["oplog"].grade is Grade.WARNING and "docs/mongo.md" in found["oplog"].mend
    for url, database in ((as_user(guarded, "stranger"), "shop"), (as_user(guarded, "reader"), None)):
        error = refused(url, database=database)
        assert isinstance(error, DeniedError) and "docs/mongo.md" in error.hint
        assert findings(url, database=database)["server"].grade is Grade.WRONG


def test_a_wrong_password_is_said_and_not_shown(guarded: MongoReplicaSet) -> None:
    """GIVEN a wrong password WHEN it is used THEN the login was refused."""
    error = refused(as_user(guarded, "reader", PASSWORD + "x"), database="shop")
    assert isinstance(error, DeniedError) and "password" in error.hint


def test_a_server_that_is_not_there_is_unreachable(mongod: Path) -> None:
    """GIVEN a port where nothing listens WHEN it is asked THEN it is tried again later."""
    url = f"mongodb://user:{PASSWORD}@127.0.0.1:{free_port()}/?serverSelectionTimeoutMS=300"
    assert isinstance(refused(url), UnreachableError)


@pytest.mark.parametrize(
    "url",
    [
        f"mongodb://user:{PASSWORD}@host:port/",
        f"mongodb://user:{PASSWORD}@host/?replicaSet",
        f"mongodb://us@er:{PASSWORD}@host/",
        f"mongodb://host:27017/{PASSWORD}$/?directConnection=maybe",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_being_shown(mongod: Path, url: str) -> None:
    """GIVEN a slip in a url WHEN it is used THEN neither message nor hint holds any secret of it."""
    with pytest.raises(ConfigError) as error:
        open_client(Plain(url))
    assert PASSWORD not in f"{error.value} {where(url)}"
