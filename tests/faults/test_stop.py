"""Ctrl-C is an orderly stop, whenever it comes."""

from __future__ import annotations

from pathlib import Path

from evermark.testing.commands import REAL
from evermark.testing.pipeline import Scene
from evermark.testing.until import until
from tests.faults.conftest import SharedShop


def test_ctrl_c_stops_in_order_and_loses_nothing(shop: SharedShop) -> None:
    """GIVEN an instance with embedded State WHEN the terminal interrupts its group THEN it stops as by SIGTERM."""
    first = shop.running()
    with shop.writing():
        shop.wait_more(20)
        first.forget()
        assert first.interrupt() == 0, first.text()[-2000:]
        assert first.said('"event": "stopping"') and first.said('"event": "stopped"')
        assert "Traceback" not in first.text()
        assert not first.said("state server"), "the embedded Postgres ended before we did"
        assert not first.said('"level": "error"'), first.text()[-2000:]
        assert shop.running() is not first
        shop.wait_more(20)


def test_ctrl_c_during_the_start_breaks_it_off(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN an instance that is still starting WHEN it is interrupted THEN it says so, and ends with 0 in seconds."""
    with Scene(tmp_path, pg_dsn, {"one": None}) as scene:
        for step in ("state", "spark"):
            instance = scene.up(commands=REAL)
            until(lambda i=instance, s=step: i.said(f'"step": "{s}"'), f"it starts its {step}")
            assert instance.interrupt(timeout_s=20) == 0, instance.text()[-2000:]
            assert instance.said('"event": "stopped"')
            assert "Traceback" not in instance.text()
