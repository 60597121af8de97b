"""Several instances of one deployment, on one State, that share the partitions of one source."""

from __future__ import annotations

import socket
import threading
import time
from collections import defaultdict
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import psutil

from evermark.cluster.fence import source_lease
from evermark.cluster.members import member_of
from evermark.cluster.postgres import lease_rows
from evermark.log.commits import read_commit
from evermark.log.format import CommitNote, note_of
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate
from evermark.testing.number_files import NumberFiles, event_id
from evermark.testing.pipeline import PATIENCE_S, Instance, Stage
from evermark.testing.until import until

PARTITIONS = 12
SOURCE = "numbers"


class InstancesStage(Stage):
    """`with` begins the load: a line to each partition, one after the other."""

    source = SOURCE

    def __init__(self, folder: Path, state_dsn: str, lane: str = "5m", pause_s: float = 0.01) -> None:
        super().__init__(folder, {"one": None}, one="from: beginning, bundle: 50")
        self.env["STATE_DSN"] = state_dsn
        self.sections = f'state: {{dsn: "${{STATE_DSN}}"}}\nspark: {{lane: {lane}}}\n'
        self.files = NumberFiles(str(folder), PARTITIONS)
        self.state = State(lambda: state_dsn, schema_for("scene"))
        self._done = threading.Event()
        self._pause_s = pause_s
        self._writer = threading.Thread(target=self._write, name="writer", daemon=True)

    def settings(self) -> str:
        options = f'{{folder: "{self.folder}", partitions: {PARTITIONS}}}'
        return f'{{type: "evermark.testing.number_files:NumberFiles", options: {options}}}'

    def prepare(self) -> None:
        migrate(self.state)  # whose leases are looked at before an instance has made them
        self._writer.start()

    def __exit__(self, *given: object) -> None:
        self.finish()
        super().__exit__(*given)
        self.state.close()

    def _write(self) -> None:
        number = 0
        while not self._done.wait(self._pause_s):
            self.files.add(number % PARTITIONS)
            number += 1

    def finish(self) -> None:
        """The load ends."""
        self._done.set()
        self._writer.join()

    def committed(self) -> list[str]:
        return [event_id(p, n) for p in range(PARTITIONS) for n in range(self.files.count(p))]

    def owners(self) -> dict[int, str]:
        """By partition, the instance that owns it now."""
        rows = lease_rows(self.state)
        found = {p: rows.get(source_lease(SOURCE, p)) for p in range(PARTITIONS)}
        return {p: member_of(row.holder) for p, row in found.items() if row is not None and row.holder and row.held}

    def wait_shared(self, *instances: Instance, timeout_s: float = PATIENCE_S) -> float:
        """Until these own all partitions, each its share; how many seconds it took."""
        began, names = time.monotonic(), {name_of(instance) for instance in instances}
        until(lambda: self._is_shared(names), f"{names} share the partitions", timeout_s=timeout_s)
        return time.monotonic() - began

    def _is_shared(self, names: Collection[str]) -> bool:
        owners = list(self.owners().values())
        loads = [owners.count(name) for name in names]
        return sum(loads) == PARTITIONS and max(loads) - min(loads) <= 1

    def refusals(self, instance: Instance) -> float:
        lines = instance.ask("/metrics")[1].splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("evermark_stale_writes_refused_total"))

    def notes(self) -> dict[int, list[tuple[CommitNote, float]]]:
        """By partition, its commits in the order of the log, and when each was made."""
        folder, found = self.log_root / SOURCE, defaultdict(list)
        assert isinstance(folder, Path)
        for path in sorted((folder / "_delta_log").glob("*.json")):
            try:
                made_at, actions = path.stat().st_mtime, read_commit(folder, int(path.stem)) or []
            except FileNotFoundError:
                continue  # maintenance has just removed it: a checkpoint of the table holds it
            for note in [note_of(each["commitInfo"]) for each in actions if "commitInfo" in each]:
                if isinstance(note, CommitNote):
                    found[note.partition].append((note, made_at))
        return found

    def check_epochs(self) -> None:
        """No batch of an owner stands behind one of its successor: one owner per partition at a time."""
        for partition, notes in self.notes().items():
            epochs = [note.epoch for note, _ in notes]
            assert epochs == sorted(epochs), f"partition {partition}: a stale owner has committed: {epochs}"

    def pauses_s(self, since: float) -> list[float]:
        """By partition, the longest time without a commit since then; waits until each has one after now."""
        now = time.time()
        until(lambda: all(notes[-1][1] > now for notes in self.notes().values()), "every partition goes on")
        times = [[at for _, at in notes if at >= since] for notes in self.notes().values()]
        return sorted(max(b - a for a, b in pairwise(each)) for each in times if len(each) > 1)


def name_of(instance: Instance) -> str:
    """As the deployment names it: by its host and the process."""
    return f"{socket.gethostname()}-{instance.process.pid}"


def killed_whole(instance: Instance) -> None:
    """As if its machine had died: the driver, Spark and the lanes at once."""
    mine = psutil.Process(instance.process.pid)
    processes = [mine, *mine.children(recursive=True)]
    for process in processes:
        if process.is_running():
            process.kill()
    instance.process.wait()
