"""Ctrl-C is an orderly stop, whenever it comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.testing.pipeline import Scene, Writer
from evermark.testing.until import until


def test_ctrl_c_stops_in_order_and_loses_nothing(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN an instance with embedded State WHEN the terminal interrupts its group THEN it stops as by SIGTERM."""
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        writer = Writer(pg_dsn)
        writer.start()
        try:
            first = scene.up()
            scene.wait_delivered(20)
            assert first.interrupt() == 0, first.log.read_text()[-2000:]
            assert first.said('"event": "stopping"') and first.said('"event": "stopped"')
            assert "Traceback" not in first.log.read_text()
            assert not first.said("state server"), "the embedded Postgres ended before we did"
            assert not first.said('"level": "error"'), first.log.read_text()[-2000:]
            second = scene.up()
            scene.wait_delivered(scene.delivered("one") + 20)
        finally:
            writer.finish()
        scene.check_complete()
        assert second.interrupt() == 0


@pytest.mark.parametrize("step", ["state", "spark"])
def test_ctrl_c_during_the_start_breaks_it_off(tmp_path: Path, pg_dsn: str, step: str) -> None:
    """GIVEN an instance that is still starting WHEN it is interrupted THEN it says so, and ends with 0 in seconds."""
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        instance = scene.up()
        until(lambda: instance.said(f'"step": "{step}"'), f"it starts its {step}", timeout_s=60)
        assert instance.interrupt(timeout_s=20) == 0, instance.log.read_text()[-2000:]
        assert instance.said('"event": "stopped"')
        assert "Traceback" not in instance.log.read_text()
