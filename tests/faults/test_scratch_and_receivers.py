"""Things that vanish while the pipeline runs: Spark's scratch folder, a receiver, the source's connections."""

from __future__ import annotations

import shutil

import psycopg

from evermark.app.scratch import scratch_root
from evermark.testing.listener import Failing
from evermark.testing.until import until
from tests.faults.conftest import SharedShop


def test_scratch_folder_receiver_and_connections_may_vanish(shop: SharedShop) -> None:
    """GIVEN a running pipeline WHEN scratch, a receiver and the connections go away THEN everything still arrives."""
    instance = shop.running()
    with shop.writing():
        shop.wait_more(20)

        # WHEN the scratch folder is deleted under Spark's feet
        (scratch,) = scratch_root().glob(f"evermark-scene-{instance.process.pid}")
        shutil.rmtree(scratch)
        shop.wait_more(50)

        # WHEN one receiver fails for a while, the others must not notice
        shop.receivers["flaky"].failing = Failing.parse("503:100%")
        until(lambda: instance.said("subscription fell behind"), "flaky fell behind")
        shop.wait_more(50)
        shop.receivers["flaky"].failing = None

        # WHEN the database cuts every connection
        with psycopg.connect(shop.dsn, autocommit=True) as conn:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
                " and application_name like 'evermark%'"
            )
        shop.wait_more(50)
    assert not instance.died()
