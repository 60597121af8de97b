"""`evermark demo`, shortened: the whole promise in one command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Orders are written all the while: on a busy machine, where all takes longer, a few a second are many.
SHORTENED = ("--seconds", "6", "--rate", "30")
LIMIT_S = 1_200  # it takes minutes on a machine of its own, and has limits itself


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_demo_ends_with_nothing_lost(tmp_path: Path) -> None:
    """GIVEN only embedded parts WHEN the demo runs, killing the pipeline twice THEN the ledger says lost=0."""
    tmp_path.chmod(0o711)
    ran = subprocess.run(
        [sys.executable, "-m", "evermark.cli.main", "demo", *SHORTENED, "--keep", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    last = ran.stdout.strip().splitlines()[-1]
    counts = r"produced=(\d+) taken=(\d+) overwritten=(\d+) delivered=(\d+)"
    found = re.fullmatch(rf"ledger {counts} duplicates_dropped=\d+ parked=\d+ lost=0", last)
    assert found, last
    produced, taken, overwritten, delivered = (int(n) for n in found.groups())
    assert produced == taken + overwritten > 100
    assert overwritten < produced / 2, "of a lost slot's changes each order's newest is taken"
    assert delivered > produced, "an order has two receivers at least, and a message one"
