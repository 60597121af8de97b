"""`make chaos ARGS="--upgrade REVISION[,REVISION…]"`: older revisions of the project run, then this one takes over.

The oldest program, out of the project's own history, installs the outbox and fills log and State; each is killed under
load, and the next one goes on with its folder and installed schema. This program is the last: it brings the schema up
to date, under load.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from evermark.testing.listener import Failing
from evermark.testing.pipeline import Ledger, Scene, Writer
from evermark.testing.until import until

_ROOT = Path(__file__).resolve().parents[3]


def has_history(revision: str) -> bool:
    """Whether this checkout knows the revision; an unpacked archive has no history at all."""
    known = subprocess.run(
        ["git", "-C", str(_ROOT), "cat-file", "-e", f"{revision}^{{commit}}"], capture_output=True, check=False
    )
    return known.returncode == 0


def unpacked(revision: str, folder: Path, *paths: str) -> Path:
    """The sources of the revision, or other paths of it."""
    packed = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", revision, *(paths or ("src", "receiver/src"))],
        capture_output=True,
        check=True,
    )
    folder.mkdir(mode=0o755)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


class OlderScene(Scene):
    """A scene whose programs are those of older revisions, one after the other, and at last of this one."""

    def __init__(
        self, folder: Path, dsn: str, receivers: Mapping[str, Failing | None], revisions: Sequence[str]
    ) -> None:
        super().__init__(folder, dsn, receivers)
        paths = [unpacked(revision, folder / f"older-{revision}") for revision in revisions]
        self._paths = [f"{path / 'src'}:{path / 'receiver' / 'src'}" for path in paths]
        self._paths.append(self.env.get("PYTHONPATH", ""))
        self.upgrade()

    def upgrade(self) -> None:
        self.env["PYTHONPATH"] = self._paths.pop(0)


def upgraded(folder: Path, dsn: str, revisions: Sequence[str], warned: str = "") -> Ledger:
    """Run each revision and kill it; run this program on what they left; bring the installed schema up to date.

    `warned`: the text with which this program asks for the upgrade of the installed schema.
    """
    receivers = {"one": None, "refusing": Failing.parse("422:10%")}
    with OlderScene(folder, dsn, receivers, revisions) as scene:
        writer = Writer(dsn, pause_s=0.05)
        writer.start()
        try:
            for _ in revisions:
                older = scene.up()
                scene.wait_delivered(scene.delivered("one") + 50)
                older.kill()
                scene.upgrade()
            newer = scene.up()
            scene.wait_delivered(scene.delivered("one") + 50)
            if warned:
                until(lambda: newer.said(warned), "the older schema is warned of")
                assert newer.said("evermark source install")
            scene.run("source", "install")  # while it runs, and while rows are written
            scene.wait_delivered(scene.delivered("one") + 50)
            assert not newer.said("partition stopped") and not newer.said("a gap was found")
            newer.kill()
            newer = scene.up()
            scene.wait_delivered(scene.delivered("one") + 50)
        finally:
            writer.finish()
        scene.accept_all("refusing")
        ledger = scene.check_complete()
        assert newer.terminate() == 0, newer.log.read_text()[-2000:]
        return ledger
