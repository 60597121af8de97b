"""`evermark demo`, shortened: the whole promise in one command."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "evermark.cli.main", "demo"]


@pytest.mark.timeout(1500)  # it takes two minutes on a machine of its own, and has limits itself
def test_the_demo_ends_with_nothing_lost(tmp_path: Path) -> None:
    """GIVEN only embedded parts WHEN the demo runs, killing the pipeline twice THEN the ledger says lost=0."""
    tmp_path.chmod(0o711)
    ran = subprocess.run(
        [*COMMAND, "--seconds", "6", "--rate", "30", "--keep", str(tmp_path / "demo")],
        capture_output=True,
        text=True,
        timeout=1480,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    last = ran.stdout.strip().splitlines()[-1]
    found = re.fullmatch(
        r"ledger produced=(\d+) taken=(\d+) delivered=(\d+) duplicates_dropped=\d+ parked=\d+ lost=0", last
    )
    assert found, last
    produced, taken, delivered = (int(n) for n in found.groups())
    assert produced == taken > 100
    assert delivered > 1.5 * produced  # every order has two receivers at least, a message in a room one bot or two
