"""Parts of a running instance end: Spark's JVM, the daemon that forks workers, a lane, a thread."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.chaos_engine import killed, resumed_s, spark_processes
from evermark.testing.pipeline import PATIENCE_S
from evermark.testing.until import until
from tests.faults.conftest import OwnSourceStage, SharedShop


def test_a_thread_that_ends_is_noticed_and_its_work_goes_on(tmp_path: Path) -> None:
    """GIVEN a source that exits in the thread that reads it WHEN that happens THEN all is started again, loudly."""
    with OwnSourceStage(tmp_path, "Quitting") as stage:
        instance = stage.up()
        ledger = stage.check_complete()
        assert ledger.delivered == stage.count
        assert instance.said("the thread source numbers ended")
        assert instance.terminate() == 0


def test_delivery_goes_on_after_any_process_of_spark_was_killed_or_hangs(shop: SharedShop) -> None:
    """GIVEN a running pipeline WHEN workers, daemon and JVM die, or hang, THEN events arrive again; none is lost."""
    instance = shop.running()
    with shop.writing():
        shop.wait_more(20)
        for what in ("worker", "daemon", "jvm", "jvm"):
            killed(instance, what)
            resumed_s(shop, within_s=PATIENCE_S)
        assert instance.said("Spark's JVM ended (signal 9)")

        # WHEN the JVM is alive and answers nothing
        (jvm,) = spark_processes(instance)["jvm"]
        jvm.suspend()
        until(lambda: instance.said("Spark's JVM does not answer"), "that is noticed")
        resumed_s(shop, within_s=PATIENCE_S)
    assert "Traceback" not in instance.text()
    # That such a process ends in order is seen when the next test ends it.
