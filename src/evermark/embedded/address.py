"""Where the server of a folder listens. Asked each time: one that was started again may have moved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from evermark.embedded import datafolder, postmaster
from evermark.errors import UnreachableError

DATABASE = "evermark"
DATA = "data"
PASSFILE = "pgpass"


def socket_dsn(folder: Path, server: postmaster.Postmaster, database: str = DATABASE) -> str:
    """By the socket. Holds no secret: it names the file that does."""
    host = quote(str(server.socket_folder), safe="")
    return f"postgresql://{datafolder.USER}@/{quote(database)}?host={host}&port={server.port}&{by_file(folder)}"


def by_file(folder: Path) -> str:
    return f"passfile={quote(str(folder / PASSFILE), safe='')}"


@dataclass(frozen=True)
class EmbeddedDsn:
    """The connection string of the server in `folder`, for any process of this machine. Holds the folder alone."""

    folder: Path

    def open(self) -> str:
        server = postmaster.read(self.folder / DATA)
        if server is None or server.socket_folder is None:
            raise UnreachableError(f"no server runs in {self.folder}", hint="`evermark up` starts it again")
        return socket_dsn(self.folder, server)
