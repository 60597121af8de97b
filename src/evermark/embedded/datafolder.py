"""Making a Postgres data folder, and writing the settings it runs with."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evermark.disk import sync_folder, write_whole
from evermark.embedded.binaries import Binaries
from evermark.errors import ConfigError, DiskFullError, FormatError, SetupError

USER = "postgres"
_SETTING_NAME = re.compile(r"[a-z_][a-z0-9_.]{0,62}")
_SETTING_LENGTH_MAX = 1000
_INITDB_TIMEOUT_S = 300.0
SCRAM_ITERATIONS_SINCE = 16

# Runs a program as the user the server runs as.
Run = Callable[[Sequence[str], float], "subprocess.CompletedProcess[str]"]
# Hands a file or folder to that user.
Own = Callable[[Path], None]

_DEFAULT_SETTINGS: Mapping[str, str] = {
    "wal_level": "logical",
    "fsync": "on",
    "max_connections": "100",
    "max_replication_slots": "20",
    "max_wal_senders": "20",
    "shared_buffers": "128MB",
    "jit": "off",
    # A killed reader must not keep its slot busy until its query would have ended.
    "client_connection_check_interval": "1s",
    "unix_socket_permissions": "0700",
    "password_encryption": "scram-sha-256",
    "logging_collector": "on",
    # A week of files, one a day, each overwritten a week later: the server's own log cannot fill the disk unseen.
    "log_filename": "postgres-%a.log",
    "log_truncate_on_rotation": "on",
    "log_rotation_age": "1d",
    "log_rotation_size": "0",
    "log_line_prefix": "%m [%p] %d ",
    # Statements hold data, and logs are read by more people than data is.
    "log_min_error_statement": "panic",
}


def settings_for(binaries: Binaries) -> Mapping[str, str]:
    """The settings of our own server, unless its user sets others. Passwords that people choose are guarded as ever."""
    later = {"scram_iterations": "4096"} if binaries.major >= SCRAM_ITERATIONS_SINCE else {}
    return {**_DEFAULT_SETTINGS, **later}


def ensure_password(path: Path) -> None:
    """The file in libpq's format that holds the generated password; made once, readable by its owner only."""
    if not path.exists():
        write_whole(path, f"*:*:*:{USER}:{secrets.token_urlsafe(24)}\n", replace=True, mode=0o600)


def password_in(path: Path) -> str:
    return path.read_text().strip().rpartition(":")[2]


def require_version(data: Path, binaries: Binaries) -> None:
    told = (data / "PG_VERSION").read_text().strip()
    if told != str(binaries.major):
        raise FormatError(
            f"{data} was made by Postgres {told}, and the embedded one is version {binaries.major}",
            hint=f"install the version of evermark that made it, or move the data with pg_upgrade to {binaries.major}",
        )


def create(data: Path, binaries: Binaries, password: str, run: Run, own: Own) -> None:
    """initdb. The folder takes its name only when it is complete, so that a crash in between leaves no half of one."""
    for old in data.parent.glob(f".{data.name}-*"):
        shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{data.name}-", dir=data.parent))
    # Ours, and only to be walked through by the server's user: nothing that we hand over can be swapped before it is.
    made.chmod(0o711)
    cluster, secret = made / "data", made / "password"
    try:
        cluster.mkdir(mode=0o700)
        secret.touch(mode=0o600)
        secret.write_text(password + "\n")
        own(cluster)
        own(secret)
        command = [
            str(binaries.tool("initdb")),
            f"--pgdata={cluster}",
            f"--username={USER}",
            f"--pwfile={secret}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--data-checksums",
        ]
        if binaries.major >= SCRAM_ITERATIONS_SINCE:
            # Thousands of rounds guard passwords that can be guessed. This one has 192 random bits, and every
            # connection would pay for its rounds, milliseconds of processor. (Others: `settings_for`.)
            command.append("--set=scram_iterations=1")
        ran = run(command, _INITDB_TIMEOUT_S)
        if ran.returncode != 0:
            output = ran.stderr or ran.stdout
            if "No space left" in output:
                raise DiskFullError(f"no space to make {data}", hint="free some space, then start again")
            raise SetupError(
                f"initdb failed on {data}: {output.strip()[-600:]}",
                hint="name a server instead with `state: {dsn: …}`",
            )
        cluster.rename(data)
        sync_folder(data.parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def write_settings(path: Path, data: Path, settings: Mapping[str, str], own: Own) -> None:
    """The server's configuration file: what initdb wrote, then `settings`. ALTER SYSTEM still has the last word.

    It lies beside the data folder and not in it, because root must not write where another user may put links.
    """
    lines = [
        "# Written at every start. For settings of your own use ALTER SYSTEM.",
        f"include = '{data.name}/postgresql.conf'",
    ]
    for name, value in settings.items():
        if not _SETTING_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a Postgres setting")
        if "\n" in value or "\x00" in value or len(value) > _SETTING_LENGTH_MAX:
            raise ConfigError(f"the value of the Postgres setting {name} is too long or has more than one line")
        quoted = value.replace("\\", "\\\\").replace("'", "''")
        lines.append(f"{name} = '{quoted}'")
    made = path.with_name(f".{path.name}")
    made.unlink(missing_ok=True)
    made.touch(mode=0o600)
    made.write_text("\n".join(lines) + "\n")
    own(made)
    made.rename(path)
