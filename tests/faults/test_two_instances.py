"""Two instances of one deployment: as in a rolling deploy, and with the owner asleep."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.pipeline import Instance, Scene, Writer
from evermark.testing.until import until


def test_neither_a_rolling_deploy_nor_a_paused_owner_writes_twice(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN two instances WHEN the owner is stopped and continued, then terminated THEN no stale write lands."""
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        writer = Writer(pg_dsn)
        writer.start()
        try:
            first = scene.up()
            scene.wait_delivered(20)
            second = scene.up()
            until(lambda: second.said("standing by"), "the second stands by", timeout_s=90)
            until(lambda: second.health("shop/0").get("status") == "standby", "its health says so", timeout_s=90)
            assert second.ask("/readyz")[0] == 200 and first.health("shop/0")["status"] == "healthy"

            # WHEN the owner sleeps past its lease, and wakes up again
            first.pause()
            until(lambda: second.said("source owned") and second.said("delivering"), "it took over", timeout_s=90)
            scene.wait_delivered(scene.delivered("one") + 20)
            first.wake()
            until(lambda: first.said("lease lost"), "the first noticed", timeout_s=90)
            until(lambda: first.health("shop/0")["status"] == "standby", "its health says so", timeout_s=90)
            until(lambda: _gauges(first) == {}, "it shows no old numbers of subscriptions", timeout_s=30)
            assert _gauges(second)["one"] >= 0
            scene.wait_delivered(scene.delivered("one") + 20)

            # WHEN the new owner is terminated, as in a rolling deploy, the other goes on
            assert second.terminate() == 0
            scene.wait_delivered(scene.delivered("one") + 20)
        finally:
            writer.finish()
        scene.check_complete()
        assert first.terminate() == 0


def _gauges(instance: Instance) -> dict[str, float]:
    """Lags of subscriptions as an instance shows them."""
    name = 'evermark_subscription_lag_batches{subscription="'
    lines = [line for line in instance.ask("/metrics")[1].splitlines() if line.startswith(name)]
    return {line[len(name) :].split('"')[0]: float(line.rpartition(" ")[2]) for line in lines}
