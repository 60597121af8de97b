"""Several instances of one deployment, on one State, that share the partitions of one source."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import psutil

from evermark.cluster.fence import source_lease
from evermark.cluster.holding import LIMITS
from evermark.cluster.kinds import LeaseConfig, open_leases
from evermark.cluster.liveness import is_gone
from evermark.cluster.members import Members, member_of
from evermark.errors import UnreachableError
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
    embeds_state = False

    def __init__(
        self,
        folder: Path,
        state_dsn: str,
        lane: str = "5m",
        pause_s: float = 0.01,
        ttl_s: float = LIMITS.ttl_s,
        etcd_url: str | None = None,
    ) -> None:
        super().__init__(folder, {"one": None}, one="from: beginning, bundle: 50")
        self.env["STATE_DSN"], self.ttl_s = state_dsn, ttl_s
        kept, leases = "backend: postgres", LeaseConfig()
        if etcd_url is not None:
            self.env["ETCD_URL"] = etcd_url
            kept = 'backend: etcd, etcd: {endpoints: "${ETCD_URL}"}'
            leases = LeaseConfig.model_validate({"backend": "etcd", "etcd": {"endpoints": etcd_url}})
        self.sections = (
            f'state: {{dsn: "${{STATE_DSN}}"}}\nspark: {{lane: {lane}}}\n'
            f"cluster: {{leases: {{ttl: {round(1000 * ttl_s)}ms, {kept}}}}}\n"
        )
        self.files = NumberFiles(str(folder), PARTITIONS)
        self.state = State(lambda: state_dsn, schema_for("scene"))
        self._leases = open_leases(leases, self.state)
        self._names: dict[Instance, str] = {}  # not by pid: many starts later another process has it
        self._noted: dict[int, list[tuple[CommitNote, float]]] = defaultdict(list)  # by partition
        self._noted_to = -1  # version of the log's table
        self.commits_seen = 0
        self._noting = threading.Lock()
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
        rows = self._leases.rows()
        found = {p: rows.get(source_lease(SOURCE, p)) for p in range(PARTITIONS)}
        held = {p: row.holder for p, row in found.items() if row is not None and row.held}
        return {p: member_of(holder.instance) for p, holder in held.items() if holder is not None}

    def wait_shared(self, *instances: Instance, timeout_s: float = PATIENCE_S) -> float:
        """Until these own all partitions, each its share; how many seconds it took."""
        began, names = time.monotonic(), {self.name_of(each) for each in instances}
        until(lambda: self._is_shared(names), f"{names} share the partitions", timeout_s=timeout_s)
        return time.monotonic() - began

    def _is_shared(self, names: Collection[str]) -> bool:
        try:
            owners = list(self.owners().values())
        except UnreachableError:
            return False  # etcd has part of a lease's time to answer: a busy one is asked again
        loads = [owners.count(name) for name in names]
        return sum(loads) == PARTITIONS and max(loads) - min(loads) <= 1

    def name_of(self, instance: Instance) -> str:
        """As it has announced itself."""

        def announced() -> str | None:
            assert not instance.died(), instance.log.read_text()[-3000:]
            return self.name_if_any(instance)

        return self.name_if_any(instance) or until(announced, "the instance announces itself") or ""

    def name_if_any(self, instance: Instance) -> str | None:
        if instance not in self._names:
            holders = [each.holder for each in Members(self.state).all().values()]
            mine = [each for each in holders if each.pid == instance.process.pid and not is_gone(each)]
            self._names.update((instance, each.instance) for each in mine)
        return self._names.get(instance)

    def refusals(self, instance: Instance) -> float:
        lines = instance.ask("/metrics")[1].splitlines()
        return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith("evermark_stale_writes_refused_total"))

    def notes(self) -> dict[int, list[tuple[CommitNote, float]]]:
        """By partition, its commits in the order of the log, and when each was made. What was looked at once is kept,
        though maintenance removes it; and is not looked at again: instances need the processor.
        """
        folder = self.log_root / SOURCE
        assert isinstance(folder, Path)
        with self._noting:
            names = (path.stem for path in (folder / "_delta_log").glob("*.json"))
            newest = max((int(name) for name in names), default=self._noted_to)
            # Asked for by name: of files that come while a folder is listed, the list may lack an earlier one.
            for version in range(self._noted_to + 1, newest + 1):
                self._noted_to = version
                try:
                    made_at = (folder / "_delta_log" / f"{version:020}.json").stat().st_mtime
                    actions = read_commit(folder, version) or []
                except FileNotFoundError:
                    continue  # maintenance has just removed it
                self.commits_seen += 1
                for note in (note_of(each["commitInfo"]) for each in actions if "commitInfo" in each):
                    if isinstance(note, CommitNote):
                        self._noted[note.partition].append((note, made_at))
            return {partition: list(notes) for partition, notes in self._noted.items()}

    @property
    def commits_unseen(self) -> int:
        """Which maintenance removed before they were looked at."""
        return self._noted_to + 1 - self.commits_seen

    def check_epochs(self) -> None:
        """Of every partition: one owner at a time, and each batch once (`broken_promise`)."""
        seen = self.notes()
        assert set(seen) == set(range(PARTITIONS)), f"partitions without a commit: {set(range(PARTITIONS)) - set(seen)}"
        told = {p: broken_promise([note for note, _ in notes]) for p, notes in seen.items()}
        assert not any(told.values()), told

    def last_epochs(self) -> dict[int, int]:
        """By partition, under which epoch its last batch was committed."""
        return {partition: notes[-1][0].epoch for partition, notes in self.notes().items()}

    def goes_on_s(self, began: float, epochs: Mapping[int, int]) -> float:
        """Waits until each of these partitions has a batch of an epoch above the one that is given for it: how many
        seconds after `began` the last of them had one."""

        def first_commits() -> list[float]:
            notes = self.notes()
            first = [next((at for note, at in notes[p] if note.epoch > epoch), 0.0) for p, epoch in epochs.items()]
            return [] if 0.0 in first else first

        return max(until(first_commits, f"new owners commit batches of {set(epochs)}")) - began

    def pauses_s(self, since: float, partitions: Collection[int] = range(PARTITIONS)) -> list[float]:
        """By partition, the longest time without a commit since then; waits until each has one after now."""
        now = time.time()

        def go_on() -> bool:
            notes = self.notes()
            return all(p in notes and notes[p][-1][1] > now for p in partitions)

        until(go_on, "every partition goes on")
        times = [[at for _, at in notes] for p, notes in self.notes().items() if p in partitions]
        pauses = [[b - max(a, since) for a, b in pairwise(each) if b >= since] for each in times]
        return sorted(max(each) for each in pauses if each)


def broken_promise(notes: Sequence[CommitNote]) -> str | None:
    """What the commits of one partition, in the order of the log, break: a batch of an owner that stands behind one of
    its successor is a stale write that landed, and a number that is not the next one is a batch twice, or lost."""
    epochs, batches = [note.epoch for note in notes], [note.batch for note in notes]
    if epochs != sorted(epochs):
        return f"a stale owner has committed: {epochs}"
    if batches != list(range(1, len(batches) + 1)):
        return f"batches are not numbered one after the other: {batches}"
    return None


def killed_whole(instance: Instance) -> None:
    """As if its machine had died: the driver, Spark and the lanes at once."""
    mine = psutil.Process(instance.process.pid)
    processes = [mine, *mine.children(recursive=True)]
    for process in processes:
        if process.is_running():
            process.kill()
    instance.process.wait()
