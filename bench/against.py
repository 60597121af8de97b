"""A bench of another revision of the project, run in turns with this one's: what `--against REVISION` adds.

Ours and theirs are processes of their own, theirs with the programs and the bench of that revision, in the same
environment. In turns, ours and theirs, theirs and ours: a machine that becomes slower or quicker meanwhile does so for
both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Report, say
from evermark.errors import ConfigError, EvermarkError
from evermark.testing.chaos_upgrade import unpacked

_ROOT = Path(__file__).resolve().parents[1]
_PACKED = ("src", "receiver/src", "bench")


@dataclass(frozen=True)
class Run:
    figures: Mapping[str, float]
    ratios: Mapping[str, float]
    lost: int


def against(name: str, main: str, revision: str, scale: float, pairs: int) -> Report:
    """Our medians, and `before`: the medians' ratio ours ÷ theirs of the figure `main`."""
    with tempfile.TemporaryDirectory(prefix="evermark-against-") as folder:
        Path(folder).chmod(0o711)  # a Postgres that root starts is another user's
        theirs = _unpacked(revision, Path(folder) / "before")
        if not (theirs / "bench" / f"{name}.py").exists():
            raise ConfigError(
                f"{revision} has no bench {name}", hint="measure against a later revision, or another bench"
            )
        began = time.monotonic()
        ours, before = in_turns(pairs, lambda: _run(name, scale, _ROOT), lambda: _run(name, scale, theirs))
    return compared(main, ours, before, began)


def in_turns(pairs: int, ours: Callable[[], Run], theirs: Callable[[], Run]) -> tuple[list[Run], list[Run]]:
    found: tuple[list[Run], list[Run]] = ([], [])
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            say(f"pair {pair + 1} of {pairs}: {('ours', 'before')[which]}")
            found[which].append((ours, theirs)[which]())
    return found


def compared(main: str, ours: Sequence[Run], before: Sequence[Run], began: float) -> Report:
    """Figures: our medians, and theirs as `before_…`. Ratios: ours ÷ theirs as `before` (main) and `before_…`."""
    report = Report(lost=sum(run.lost for run in ours), began=began)
    report.figures.update(_medians([run.figures for run in ours]))
    report.ratios.update(_medians([run.ratios for run in ours]))
    theirs = _medians([run.figures for run in before])
    ratios = {name: report.figures[name] / was for name, was in theirs.items() if was and name in report.figures}
    if main in ratios:
        report.ratios["before"] = ratios[main]
        both = zip(ours, before, strict=True)
        of_pairs = [our.figures[main] / their.figures[main] for our, their in both if their.figures[main]]
        report.figures["before_ratio_min"], report.figures["before_ratio_max"] = min(of_pairs), max(of_pairs)
    else:
        say(f"no ratio `before`: the other revision has no figure {main}")
    report.ratios.update({f"before_{name}": ratio for name, ratio in ratios.items()})
    report.figures.update({f"before_{name}": value for name, value in theirs.items()})
    report.figures["before_lost"] = sum(run.lost for run in before)
    return report


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of what every run has."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def _unpacked(revision: str, folder: Path) -> Path:
    try:
        return unpacked(revision, folder, *_PACKED)
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()
        raise ConfigError(f"{revision} cannot be measured: {said}", hint="name a commit that has benches") from error


def _run(name: str, scale: float, root: Path) -> Run:
    """One run of the bench as it is at `root`."""
    path = os.pathsep.join(map(str, (root / "src", root / "receiver" / "src", root)))
    ran = subprocess.run(
        [sys.executable, "-m", "bench", name, "--json", "--scale", str(scale)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=False,  # a run that lost something exits with 1, and still reports
    )
    try:
        said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return Run(said["figures"], said["ratios"], said["lost"])
    except (IndexError, KeyError, ValueError) as error:
        raise EvermarkError(f"the bench {name} at {root} ended with exit code {ran.returncode}") from error
