"""A deployment whose log is in an S3 bucket: killed, cut off from the store, and gone on with."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from evermark.storage import Place, access
from evermark.testing.lost_slot import SLOT, slot_is_dropped
from evermark.testing.objects import ACCESS_KEY, SECRET_KEY, Fault, FaultyProxy, S3Server
from evermark.testing.pipeline import Writer, died_by_itself
from evermark.testing.replays import ReplayScene
from evermark.testing.until import until


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    made = FaultyProxy(s3)
    yield made
    made.close()


def sections(s3: S3Server, place: Place, endpoint: str) -> str:
    keys = "access_key: '${{file:{}}}', secret_key: '${{file:{}}}'".format(*s3.key_files)
    return f"log: {{path: '{place}'}}\nstorage: {{endpoint: '{endpoint}', region: us-east-1, {keys}}}\n"


def test_a_log_in_a_bucket_survives_a_kill_and_a_store_that_fails(
    tmp_path: Path, pg_dsn: str, s3: S3Server, s3_place: Place, proxy: FaultyProxy
) -> None:
    """GIVEN a running shop whose log is in S3 WHEN the instance is killed between a commit and its head, and later the
    store refuses everything, and loses answers to commits, and its slot is dropped THEN every order is in the log and
    at every receiver once; a replay of all of them reaches every receiver once more; the command line reads the log
    there; and no credential is in any file."""
    with ReplayScene(
        tmp_path, pg_dsn, {"one": None, "picky": None}, picky="where: 'data.total > 0 and key is not null'"
    ) as scene:
        scene.log_root = s3_place
        with scene.config.open("a") as file:
            file.write(sections(s3, s3_place, proxy.endpoint))
        writer = Writer(pg_dsn)
        writer.start()
        died_by_itself(scene.up("log.committed@3"))
        instance = scene.up()
        scene.wait_delivered(30)
        proxy.choose = lambda *_: Fault(answer=(503, "SlowDown"))
        until(lambda: instance.health("shop/0").get("status") == "stale", "the trouble is seen")
        lost: set[str] = set()

        def lose_first(method: str, path: str) -> Fault | None:
            if method == "PUT" and re.search(r"_delta_log/\d+\.json", path) and path not in lost:
                lost.add(path)
                return Fault(lose=True)
            return None

        proxy.choose = lose_first
        scene.wait_delivered(scene.delivered("one") + 40)
        with psycopg.connect(pg_dsn, autocommit=True) as conn:
            until(lambda: slot_is_dropped(conn, SLOT), "the slot is dropped")
        until(lambda: instance.said("the gap is closed"), "the gap is closed")
        writer.finish()
        scene.check_complete()
        assert lost, "or nothing was lost on the way"
        everything = scene.events_between("2000-01-01", "2100-01-01")
        scene.ask_by_sql("2000-01-01", "2100-01-01")
        scene.wait_cleared()
        (replay,) = scene.replays()
        assert replay["state"] == "done"
        for name in scene.handled:
            assert scene.replayed[name][replay["id"]] == Counter(everything), name
        ran = scene.run("log", "query", "select count(distinct event_id) as n from shop where op = 'insert'", "--json")
        with psycopg.connect(pg_dsn) as conn:
            (orders,) = conn.execute("select count(*) from public.orders").fetchone() or (0,)
        assert json.loads(ran.stdout) == {"n": orders}
        assert json.loads(scene.run("log", "info", "--json").stdout)[0]["rows"] >= orders
        assert instance.terminate() == 0
        texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*.log")] + [scene.config.read_text()]
        assert not any(secret in text for secret in (ACCESS_KEY, SECRET_KEY) for text in texts)
        assert not (tmp_path / "data" / "log").exists()
        assert access.VARIABLE not in "".join(texts)
