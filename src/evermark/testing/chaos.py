"""`make chaos`: the real process killed at every effect boundary, each time ending exact.

`python -m evermark.testing.chaos [--failpoint NAME] [--chain]` runs on a server and folders of its own; its last
line is a ledger.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from evermark import failpoint
from evermark.testing.listener import Failing
from evermark.testing.pipeline import Scene, Writer, died_by_itself
from evermark.testing.servers import fresh_database, postgres_server


def killed_at_each(names: Sequence[str], folder: Path, dsn: str) -> int:
    """Die at each of `names` in turn while a writer goes on; then drain and require exactness; the number of events."""
    # Refused events are parked, so that the queue's failpoints are reached too.
    with Scene(folder, dsn, {"steady": None, "refusing": Failing.parse("422:3%")}) as scene:
        writer = Writer(dsn)
        writer.start()
        try:
            for name in names:
                died_by_itself(scene.up(f"{name}@2"))
            last = scene.up()
            scene.wait_delivered(scene.delivered("steady"))
        finally:
            writer.finish()
        scene.receivers["refusing"].failing = None
        scene.run("delivery", "retry", "--subscription", "refusing")
        scene.check_complete()
        code = last.terminate()
        assert code == 0, f"the last instance ended with {code}"
        return len(scene.committed())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evermark.testing.chaos", description=__doc__)
    parser.add_argument("--failpoint", action="append", choices=failpoint.NAMES, help="only this one; may be repeated")
    parser.add_argument(
        "--chain", action="store_true", help="one scene, killed at one after the other: a third of the time"
    )
    given = parser.parse_args()
    names = given.failpoint or failpoint.NAMES
    scenes = [("chain", names)] if given.chain else [(name, [name]) for name in names]
    events = 0
    with tempfile.TemporaryDirectory(prefix="evermark-chaos-") as root:
        Path(root).chmod(0o711)
        with postgres_server(Path(root) / "postgres") as server:
            for title, kills in scenes:
                folder = Path(root) / title
                folder.mkdir(mode=0o711)
                with fresh_database(server) as dsn:
                    count = killed_at_each(kills, folder, dsn)
                events += count
                sys.stderr.write(f"killed at {', '.join(kills)}: {count} events, exact\n")
    sys.stdout.write(f"ledger kills={len(names)} produced={events} taken={events} lost=0\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
