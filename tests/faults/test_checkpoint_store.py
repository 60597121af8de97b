"""Checkpoints in etcd: killed under a running instance, given back, and all of them deleted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from evermark.testing.etcds import Etcd, etcd_server
from evermark.testing.pipeline import Instance, Scene, Writer
from evermark.testing.until import until


@pytest.fixture
def store(etcd_program: None, tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of this test's own: it is killed."""
    with etcd_server(tmp_path / "etcd") as server:
        yield server


def away(instance: Instance) -> dict[str, object]:
    return dict(json.loads(instance.ask("/health")[1])["checkpoints_away"])


def test_s13_an_etcd_that_is_killed_and_all_checkpoints_deleted_lose_and_double_nothing(
    tmp_path: Path, pg_dsn: str, store: Etcd
) -> None:
    """GIVEN an instance whose checkpoints are in etcd, and lanes that are renewed every few seconds WHEN etcd is killed
    THEN events go on being taken and delivered, health says why it is degraded, the instance stays ready; given back,
    it is used again without a restart. WHEN all checkpoints are deleted THEN the next start goes on where the log ends.
    """

    class InEtcd(Scene):
        sections = (
            "spark: {lane: 4s}\n"
            "reliability:\n"
            "  circuit_breaker: {timeout: 1s}\n"
            f"  checkpoint: {{backend: etcd, interval: 200ms, etcd: {{endpoints: '{store.url}', prefix: /marks/}}}}\n"
        )

    with InEtcd(tmp_path, pg_dsn, {"one": None}) as scene:
        instance = scene.up()
        writer = Writer(pg_dsn)
        writer.start()
        try:
            scene.wait_delivered(20)
            until(lambda: "batch" in store.control("get", "/marks/shop/partition-0"), "a checkpoint is in etcd")
            store.kill()
            until(lambda: "shop" in away(instance), "health says that the store is away")
            owned = instance.log.read_text().count('"event": "source owned"')
            scene.wait_delivered(scene.delivered("one") + 20)
            until(
                lambda: instance.log.read_text().count('"event": "source owned"') >= owned + 2,
                "lanes are renewed meanwhile",
            )
            scene.wait_delivered(scene.delivered("one") + 20)
            assert instance.ask("/readyz")[0] == 200, instance.ask("/readyz")
            assert json.loads(instance.ask("/health")[1])["status"] == "degraded"
            assert not instance.said("a gap was found")
            assert "its checkpoints cannot be read: " in scene.run("status").stderr
            store.start()
            until(lambda: away(instance) == {}, "the store is used again")
        finally:
            writer.finish()
        scene.check_complete()
        assert instance.terminate() == 0
        kept = json.loads(scene.run("checkpoint", "list", "--json").stdout)
        heads = json.loads(scene.run("status", "--json").stdout)["sources"]
        assert [each["batch"] for each in kept] == [each["log_head"] for each in heads]

        store.control("del", "--prefix", "/marks/")
        assert json.loads(scene.run("checkpoint", "list", "--json").stdout) == []
        instance = scene.up()
        writer = Writer(pg_dsn)
        writer.start()
        try:
            scene.wait_delivered(scene.delivered("one") + 20)
        finally:
            writer.finish()
        scene.check_complete()
        assert not instance.said("a gap was found")
        assert instance.terminate() == 0
