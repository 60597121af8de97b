"""A loop hangs while its process lives: its lease passes on, and events keep flowing."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.testing.chaos_engine import resumed_s
from evermark.testing.pipeline import PATIENCE_S, Scene, Writer
from evermark.testing.until import until


class HangingScene(Scene):
    sections = "cluster: {leases: {hang: 20s}}\n"


@pytest.mark.parametrize(
    ("failpoint", "lease"),
    [("log.committed", "source:shop"), ("settle.begun", "deliver")],
    ids=["reading", "delivering"],
)
def test_a_loop_that_hangs_loses_its_lease_and_events_go_on(
    tmp_path: Path, pg_dsn: str, failpoint: str, lease: str
) -> None:
    """GIVEN a loop that hangs between two effects, in a process that lives WHEN the bound is over THEN its lease is let
    go of, loudly, another lane takes over, and every event is once in the log and at the receiver."""
    hung = tmp_path / "hung"
    with HangingScene(tmp_path, pg_dsn, {"one": None}) as scene:
        scene.env["EVERMARK_HANG"] = f"{failpoint}@5:{hung}"
        instance = scene.up()
        writer = Writer(pg_dsn)
        writer.start()
        try:
            until(hung.exists, "the loop hangs", timeout_s=PATIENCE_S)
            until(lambda: instance.said(f"the loop of {lease} hangs"), "its lease is let go of", timeout_s=PATIENCE_S)
            print(f"goes on after {resumed_s(scene, within_s=PATIENCE_S):.1f} s")
        finally:
            writer.finish()
        ledger = scene.check_complete()
        print(ledger)
        assert f'evermark_hanging_loops_total{{name="{lease}"}} 1.0' in instance.ask("/metrics")[1]
        assert instance.said("the lane ends, and is started again") and instance.said("failpoint.py")
        assert scene.said(f"the loop of {lease} hangs") == 2, "once by its keeper, once by its lane"
        assert instance.terminate() == 0
