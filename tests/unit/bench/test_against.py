"""A bench of two revisions, in turns: which runs when, and what is made of their figures."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench.__main__ import BENCHES
from bench.against import Run, against, compared, in_turns
from evermark.errors import ConfigError

_ROOT = Path(__file__).resolve().parents[3]


def _run(p50_s: float, lost: int = 0, **more: float) -> Run:
    return Run({"p50_s": p50_s, **more}, {"debezium_p50": 2 * p50_s}, lost)


def test_a_machine_that_becomes_slower_does_so_for_both() -> None:
    """The first of a pair is the second of the next."""
    began: list[str] = []

    def turn(who: str) -> Run:
        began.append(who)
        return _run(1.0)

    ours, theirs = in_turns(3, lambda: turn("ours"), lambda: turn("theirs"))
    assert began == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert len(ours) == len(theirs) == 3


def test_before_is_the_ratio_of_the_medians_of_the_main_figure() -> None:
    """One run that was disturbed changes nothing; how far the pairs were apart is told."""
    report = compared("p50_s", [_run(1.0), _run(9.0), _run(1.0)], [_run(2.0), _run(2.0), _run(2.0)], 0.0)
    assert report.ratios["before"] == 0.5
    assert (report.figures["before_ratio_min"], report.figures["before_ratio_max"]) == (0.5, 4.5)
    assert (report.figures["p50_s"], report.figures["before_p50_s"]) == (1.0, 2.0)
    assert report.ratios["debezium_p50"] == 2.0


def test_each_figure_that_both_have_has_a_ratio() -> None:
    """A figure that only one of them has, or that was zero before, has none."""
    ours = [_run(1.0, cpu_s_per_1000=3.0, new=1.0, zero=1.0)]
    report = compared("p50_s", ours, [_run(1.0, cpu_s_per_1000=6.0, old=1.0, zero=0.0)], 0.0)
    assert {name for name in report.ratios if name.startswith("before")} == {
        "before",
        "before_p50_s",
        "before_cpu_s_per_1000",
    }
    assert report.ratios["before_cpu_s_per_1000"] == 0.5


def test_without_the_main_figure_there_is_no_ratio_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Another figure is not taken for it, and it is said."""
    report = compared("p99_s", [_run(1.0, p99_s=1.0)], [_run(1.0)], 0.0)
    assert "before" not in report.ratios
    assert "p99_s" in capsys.readouterr().err


def test_what_each_lost_is_counted_apart() -> None:
    """An older revision that lost something does not fail this one."""
    report = compared("p50_s", [_run(1.0), _run(1.0, lost=1)], [_run(1.0, lost=2), _run(1.0, lost=3)], 0.0)
    assert (report.lost, report.figures["before_lost"]) == (1, 5)


def test_a_revision_without_the_bench_is_told_so() -> None:
    """Nothing is run: the root of the history has no bench of that name."""
    if not (_ROOT / ".git").exists():
        pytest.skip("the history is not here")
    listed = subprocess.run(
        ["git", "-C", str(_ROOT), "rev-list", "--max-parents=0", "HEAD"], capture_output=True, check=True, text=True
    )
    with pytest.raises(ConfigError):
        against("footprint", "idle_cpu_cores", listed.stdout.split()[-1], 0.01, 1)


def test_every_bench_there_is_has_a_module_and_a_row_in_the_docs() -> None:
    """A bench is run by its name, and found in docs/bench.md by it."""
    page = (_ROOT / "docs" / "bench.md").read_text()
    for name in BENCHES:
        assert (_ROOT / "bench" / f"{name}.py").exists()
        assert f"| `{name}` |" in page
