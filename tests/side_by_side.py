"""`make test`: all tests, in parts that run side by side, each a pytest of its own with its own log.

Most of the time tests wait for another process, so two parts more than there are cores fill them. The longest parts
begin first; what is short is left for the end, when the others are nearly done. Parts that run instances take turns
with others, as instances need memory. All that pytest said of a part that failed is shown, and the names of the failed
tests come last. Long tests take turns (`tests/turns.py`), unless somebody chooses among the tests by words for pytest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.turns import LONG, VARIABLE, resting, turn_of

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "artifacts" / "tests"
PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=10")
NOTHING_SELECTED = 5  # of this part, by what was given on the command line
INTERRUPTED = 130
# Each part may have an instance running: two gigabytes, with its Spark and its Postgres.
AT_ONCE_MAX = 6
SLOWEST = 15
# Python reads it when it starts. Parts start hundreds of processes, each of which would compile all modules anew.
KEEPS_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
# Thousands of databases of three hundred files each are made and dropped, and each file of a log is synced. In memory
# that costs a fifth less processor, and no waiting for a disk; but it may need a few gigabytes.
MEMORY_DISK = Path("/dev/shm")  # noqa: S108 - a folder of our own in it
MEMORY_FREE_MIN = 10 * 2**30
_IN_MEMORY = "evermark-tests"
FOLDERS_OF_TESTS = "PYTEST_DEBUG_TEMPROOT"

# The longest first. The tests of one part of faults share a deployment, so they stay together.
PARTS: Mapping[str, Sequence[str]] = {
    "spark": ("tests/spark/delivery", "tests/spark/ingest", "tests/spark/start"),
    "contract-rest": (
        "tests/contract/blocknode",
        "tests/contract/blocks",
        "tests/contract/cli",
        "tests/contract/log",
        "tests/contract/storage",
        "tests/contract/webhook",
    ),
    "faults-tables": (
        "tests/faults/test_copy.py",
        "tests/faults/test_lost_tables_slot.py",
        "tests/faults/test_mongo_copy.py",
    ),
    "spark-log": ("tests/spark/log",),
    "faults-readers": (
        "tests/faults/test_blocks.py",
        "tests/faults/test_bots.py",
        "tests/faults/test_lost_slot.py",
        "tests/faults/test_mongo.py",
        "tests/faults/test_object_store.py",
    ),
    "faults-oracle": (
        "tests/faults/test_oracle.py",
        "tests/faults/test_replica_source.py",
        "tests/faults/test_replicas.py",
    ),
    "unit": ("tests/unit",),
    "faults-databases": (
        "tests/faults/test_installed_again.py",
        "tests/faults/test_lost_log.py",
        "tests/faults/test_other_database.py",
        "tests/faults/test_upgrade.py",
    ),
    "contract-tables": (
        "tests/contract/postgres/test_backfill_command.py",
        "tests/contract/postgres/test_copy_out.py",
        "tests/contract/postgres/test_feed.py",
        "tests/contract/postgres/test_tables.py",
        "tests/contract/postgres/test_tables_copy.py",
        "tests/contract/postgres/test_tables_identity.py",
        "tests/contract/postgres/test_tables_install.py",
        "tests/contract/postgres/test_tables_random.py",
        "tests/contract/postgres/test_tables_scan.py",
        "tests/contract/postgres/test_tables_values.py",
    ),
    "faults-lanes": (
        "tests/faults/test_checkpoint_store.py",
        "tests/faults/test_exhausted.py",
        "tests/faults/test_hanging_loop.py",
        "tests/faults/test_lanes.py",
        "tests/faults/test_network.py",
    ),
    "contract-stores": (
        "tests/contract/delivery",
        "tests/contract/replica_source",
        "tests/contract/replicas",
        "tests/contract/state",
    ),
    "faults-shared": (
        "tests/faults/test_engine_dies.py",
        "tests/faults/test_health.py",
        "tests/faults/test_kill_at_effects.py",
        "tests/faults/test_replay.py",
        "tests/faults/test_scratch_and_receivers.py",
        "tests/faults/test_stop.py",
        "tests/faults/test_two_instances.py",
    ),
    "contract-mongo": ("tests/contract/checkpoints", "tests/contract/mongo"),
    "demo": ("tests/acceptance/test_demo.py",),
    "contract-install": (
        "tests/contract/postgres/test_connecting.py",
        "tests/contract/postgres/test_doctor.py",
        "tests/contract/postgres/test_install.py",
        "tests/contract/postgres/test_install_command.py",
        "tests/contract/postgres/test_names.py",
        "tests/contract/postgres/test_outbox_upgrade.py",
        "tests/contract/postgres/test_recover_command.py",
        "tests/contract/postgres/test_repair.py",
        "tests/contract/postgres/test_repair_tries.py",
        "tests/contract/postgres/test_upkeep.py",
    ),
    "contract-outbox": (
        "tests/contract/postgres/test_boundaries.py",
        "tests/contract/postgres/test_contract.py",
        "tests/contract/postgres/test_key_changes.py",
        "tests/contract/postgres/test_partitions.py",
        "tests/contract/postgres/test_source.py",
        "tests/contract/postgres/test_untaken.py",
    ),
    "faults-cluster": ("tests/faults/test_cluster.py",),
    "simulation": ("tests/simulation",),
    "acceptance": ("tests/acceptance/test_api.py", "tests/acceptance/test_bad_input.py"),
    "faults-instances": ("tests/faults/test_instances.py",),
}

_SLOW = re.compile(r"^\s*([\d.]+)s (?:call|setup|teardown)\s+\S.*$", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)


@contextmanager
def folders_in_memory(disk: Path = MEMORY_DISK, wanted: int = MEMORY_FREE_MIN) -> Iterator[Mapping[str, str]]:
    """What tells pytest to make its folders in memory, where that is large; nothing where it is not, as in many
    containers, or where the user has said where."""
    try:
        found = os.statvfs(disk)
        is_fit = found.f_bavail * found.f_frsize >= wanted and not found.f_flag & getattr(os, "ST_NOEXEC", 0)
    except OSError:
        is_fit = False
    if not is_fit or psutil.virtual_memory().available < wanted or FOLDERS_OF_TESTS in os.environ:
        yield {}
        return
    for left in disk.glob(f"{_IN_MEMORY}-*-*"):  # by a run that was killed: it would hold memory for ever
        pid = left.name.removeprefix(f"{_IN_MEMORY}-").split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    name = f"{_IN_MEMORY}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=name, dir=disk, ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # servers run as another user
        yield {FOLDERS_OF_TESTS: folder}


@dataclass(frozen=True)
class Ended:
    part: str
    code: int
    took_s: float
    processor_s: float  # with the processes that it has waited for
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def is_well(self) -> bool:
        return self.code in (0, NOTHING_SELECTED)

    def last_line(self) -> str:
        return next((line.strip("= ") for line in reversed(self.text.splitlines()) if line.strip()), "said nothing")

    def failures(self) -> list[str]:
        return _FAILED.findall(self.text) or [f"{self.part}: pytest ended with code {self.code}, see {self.log}"]


@dataclass
class Runner:
    parts: Mapping[str, Sequence[str]]
    command: Sequence[str] = PYTEST
    logs: Path = LOGS
    environ: Mapping[str, str] = field(default_factory=dict)  # more of it
    _running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _is_stopped: bool = False

    def run(self, at_once: int) -> int:
        self.logs.mkdir(parents=True, exist_ok=True)
        ended: list[Ended] = []
        with ThreadPoolExecutor(at_once) as threads:
            for each in as_completed([threads.submit(self._run, part) for part in self.parts]):
                found = each.result()
                if found is not None:
                    times = f"{found.took_s:5.0f} s {found.processor_s:5.0f} s of processor"
                    print(f"{found.part:<18} {times}  {found.last_line()}", flush=True)
                    ended.append(found)
        return INTERRUPTED if self._is_stopped else _told(ended)

    def stop(self, *_: object) -> None:
        """End what runs, in order: servers and instances that tests have started are ended by the tests."""
        self._is_stopped = True
        for process in list(self._running):
            process.send_signal(signal.SIGINT)

    def _run(self, part: str) -> Ended | None:
        if self._is_stopped:
            return None
        began, log = time.monotonic(), self.logs / f"{part}.log"
        with log.open("wb") as out:
            # Not of our process group: Ctrl-C reaches us alone, and each part is told of it once.
            process = subprocess.Popen(
                [*self.command, *self.parts[part]],
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name != KEEPS_NO_BYTECODE} | self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._running.append(process)
        if self._is_stopped:
            process.send_signal(signal.SIGINT)  # it began while the others were told
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = code = os.waitstatus_to_exitcode(status)
        self._running.remove(process)
        return Ended(part, code, time.monotonic() - began, used.ru_utime + used.ru_stime, log)


def _told(ended: Sequence[Ended]) -> int:
    failed = [one for one in ended if not one.is_well]
    for one in failed:
        print(f"\n===== {one.part} =====\n{one.text}")
    slow = sorted((found for one in ended for found in _SLOW.finditer(one.text)), key=lambda found: -float(found[1]))
    print("\nslowest:", *(found[0].strip() for found in slow[:SLOWEST]), sep="\n")
    for one in failed:
        print(*one.failures(), sep="\n")
    if not failed and all(one.code == NOTHING_SELECTED for one in ended):
        print("no test was selected")
        return NOTHING_SELECTED
    print("failed" if failed else "all passed")
    return 1 if failed else 0


def main(words: Sequence[str]) -> int:
    turn = None if words and VARIABLE not in os.environ else turn_of()
    rest = resting(turn)
    with folders_in_memory() as environ:
        runner = Runner(PARTS, (*PYTEST, *(f"--deselect={test}" for test in rest), *words), environ=environ)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, runner.stop)
        if rest:
            long = sum(map(len, LONG))
            print(f"turn {turn}: {long - len(rest)} of {long} long tests run (tests/turns.py); all: make test TURN=all")
        return runner.run(min(AT_ONCE_MAX, (os.cpu_count() or 1) + 2))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
