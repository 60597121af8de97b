"""`python -m bench NAME --json [--scale S]`: progress on stderr, one JSON object as the last line on stdout."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path

import bench
from bench.report import Report, say

_NOT_BENCHES = {
    "__main__",
    "pairs",
    "debezium",
    "debezium_child",
    "nodes",
    "receiver_child",
    "report",
    "shop",
    "streams_child",
}


def names() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if m.name not in _NOT_BENCHES)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=names())
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line is always JSON")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is the full size")
    given = parser.parse_args()
    run = importlib.import_module(f"bench.{given.name}").run
    with tempfile.TemporaryDirectory(prefix=f"evermark-bench-{given.name}-") as folder:
        Path(folder).chmod(0o711)
        say(f"bench {given.name} at scale {given.scale}")
        report: Report = run(given.scale, Path(folder))
    sys.stdout.write(report.as_json(given.name) + "\n")
    return 1 if report.lost else 0


if __name__ == "__main__":
    sys.exit(main())
