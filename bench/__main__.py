"""`python -m bench NAME --json [--scale S] [--against REVISION]`: progress on stderr, one JSON object as the last line
on stdout.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from bench.against import against
from bench.report import Report, say
from evermark.errors import EvermarkError

# Each bench, and its main figure: the one that two revisions are compared by.
BENCHES = {
    "copy": "rows_per_s",
    "deliver": "single_per_s",
    "diff": "s_large",
    "footprint": "idle_cpu_cores",
    "format": "where_s",
    "gap": "events_per_s",
    "growth": "ms_per_batch_50000",
    "implied": "s_first",
    "ingest": "events_per_s",
    "isolation": "healthy_p99_s",
    "latency": "p50_s",
    "memory": "rss_mb_transaction",
    "mongo": "events_per_s",
    "replay": "delivered_events_per_s",
    "scale": "replay_2_per_s",
    "sources": "p50_s",
    "streams": "start_s",
    "subscriptions": "s_1000",
    "tables": "events_per_s",
    "tail": "p99_s",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHES))
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the last line is always JSON")
    parser.add_argument("--scale", type=float, default=1.0, help="1.0 is the full size")
    parser.add_argument("--against", metavar="REVISION", help="run this commit of the project, too, in turns")
    parser.add_argument("--pairs", type=int, default=3, help="how many turns each, with --against")
    given = parser.parse_args()
    try:
        if given.against is None:
            report = _measured(given.name, given.scale)
        else:
            report = against(given.name, BENCHES[given.name], given.against, given.scale, given.pairs)
    except EvermarkError as error:
        say(f"{error.message}\n{error.hint}")
        return 2
    sys.stdout.write(report.as_json(given.name) + "\n")
    return 1 if report.lost else 0


def _measured(name: str, scale: float) -> Report:
    run = importlib.import_module(f"bench.{name}").run
    with tempfile.TemporaryDirectory(prefix=f"evermark-bench-{name}-") as folder:
        Path(folder).chmod(0o711)
        say(f"bench {name} at scale {scale}")
        report: Report = run(scale, Path(folder))
    return report


if __name__ == "__main__":
    sys.exit(main())
