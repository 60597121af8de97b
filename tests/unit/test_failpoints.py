"""ARCHITECTURE's table of crashes, the failpoints and the places in the code where they stand are the same."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from evermark import failpoint

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "evermark"
_HIT = re.compile(r'failpoint\.hit\("([^"]+)"\)')
_NAME = re.compile(r"`([a-z_]+\.[a-z_]+)`")
# Walked over as a whole by `make chaos`.
WALKED = {*failpoint.FLOW, *failpoint.MEND, *failpoint.COPY}


def _rows() -> list[list[str]]:
    """The cells of each row of the table under "What may crash where"."""
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## What may crash where\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert head[-1] == "failpoints"
    return rows


def _texts(*folders: Path) -> dict[Path, str]:
    return {path: path.read_text() for folder in folders for path in sorted(folder.rglob("*.py"))}


def test_the_table_of_crashes_names_every_failpoint_and_no_other() -> None:
    """GIVEN the table WHEN its last column is read THEN it holds failpoint.NAMES; no row is without one."""
    named = [_NAME.findall(row[-1]) for row in _rows()]
    assert all(named), "a row without a failpoint"
    assert {name for names in named for name in names} == set(failpoint.NAMES)


def test_every_failpoint_stands_in_the_code() -> None:
    """A name that nothing reaches proves nothing; a name that is not listed cannot be asked for."""
    hits = Counter(name for text in _texts(SOURCES).values() for name in _HIT.findall(text))
    assert set(hits) == set(failpoint.NAMES)
    assert len(failpoint.NAMES) == len(set(failpoint.NAMES))


def test_every_failpoint_is_one_at_which_something_is_killed() -> None:
    """GIVEN a failpoint that `make chaos` does not walk over THEN a test of a real process names it."""
    told = "\n".join(_texts(ROOT / "tests" / "faults", ROOT / "tests" / "contract", SOURCES / "testing").values())
    for name in set(failpoint.NAMES) - WALKED:
        assert re.search(rf'"{re.escape(name)}(@\d+)?"', told), f"nothing is killed at {name}"
