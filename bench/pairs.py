"""`python -m bench.pairs NAME --before REVISION [--pairs N] [--scale S]`: a bench of an older revision and of this one.

They run in turns, older and newer, newer and older, so that a machine that becomes slower or quicker meanwhile does so
for both. The last line on stdout is JSON: for each figure the medians of both, and the median of the ratios newer ÷
older of the pairs. The older program comes out of the project's history and runs in the same environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.report import say
from evermark.testing.chaos_upgrade import unpacked

_ROOT = Path(__file__).resolve().parents[1]


def measured(name: str, scale: float, root: Path) -> dict[str, float]:
    """The figures of one run of the bench as it is at `root`. What the benches are measured against is run as well."""
    path = f"{root / 'src'}:{root / 'receiver' / 'src'}:{root}"
    ran = subprocess.run(
        [sys.executable, "-m", "bench", name, "--json", "--scale", str(scale)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    if report["lost"]:
        raise SystemExit(f"{name} at {root}: lost {report['lost']}")
    return {**report["figures"], **{f"ratio {key}": value for key, value in report["ratios"].items()}}


def compared(older: list[dict[str, float]], newer: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """By figure: both medians, and the median, least and greatest of newer ÷ older over the pairs."""
    found: dict[str, dict[str, float]] = {}
    for name in sorted(older[0].keys() & newer[0].keys()):
        ratios = [new[name] / old[name] for old, new in zip(older, newer, strict=True) if old[name]]
        if ratios:
            found[name] = {
                "older": round(statistics.median(run[name] for run in older), 6),
                "newer": round(statistics.median(run[name] for run in newer), 6),
                "ratio": round(statistics.median(ratios), 4),
                "ratio_min": round(min(ratios), 4),
                "ratio_max": round(max(ratios), 4),
            }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.pairs", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--before", required=True, metavar="REVISION")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--scale", type=float, default=0.1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="evermark-pairs-") as folder:
        Path(folder).chmod(0o711)
        roots = (unpacked(given.before, Path(folder) / "older", "src", "receiver/src", "bench"), _ROOT)
        runs: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        for pair in range(given.pairs):
            for which in (0, 1) if pair % 2 == 0 else (1, 0):
                say(f"pair {pair + 1} of {given.pairs}: the {('older', 'newer')[which]}")
                runs[which].append(measured(given.name, given.scale, roots[which]))
    body = {"bench": given.name, "before": given.before, "pairs": given.pairs, "scale": given.scale}
    sys.stdout.write(json.dumps({**body, "figures": compared(*runs)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
