"""How object stores are reached: what `storage:` of the file says, by references, never the secrets themselves.

A path of a log file travels as text through plans, tasks and processes, and text has to be enough to open it. So how a
bucket is reached stands in one variable of the environment, which Spark's processes inherit. It has names only: the
process that opens a file reads the secrets behind them. A bucket that is not in it is reached by the environment's
own chain (AWS_ACCESS_KEY_ID and its like, a profile of the machine).
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from evermark.errors import ConfigError
from evermark.secrets import KeyRef

VARIABLE = "EVERMARK_STORAGE"


@dataclass(frozen=True)
class Access:
    """To one bucket. Safe to show and to send."""

    endpoint: str | None = None
    region: str | None = None
    access_key: KeyRef | None = None
    secret_key: KeyRef | None = None
    path_style: bool = True  # where an endpoint is given: the bucket in the path, not in the host's name

    def credentials(self) -> tuple[str, str] | None:
        """The access key and the secret key, read here and now; None: by the environment's own chain."""
        if self.access_key is None or self.secret_key is None:
            return None
        named = (("storage.access_key", self.access_key), ("storage.secret_key", self.secret_key))
        access_key, secret_key = (ref.read(what).decode("utf-8", "replace") for what, ref in named)
        return access_key, secret_key


def remember(root: str, access: Access) -> None:
    """For this process, and the processes that it starts from now on."""
    known = {**_known(), root: asdict(access)}
    os.environ[VARIABLE] = json.dumps(known, separators=(",", ":"))


def access_to(root: str) -> Access:
    said: dict[str, Any] | None = _known().get(root)
    if said is None:
        return Access()
    refs = {name: KeyRef(**said[name]) if said[name] else None for name in ("access_key", "secret_key")}
    return Access(**{**said, **refs})


def _known() -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(os.environ.get(VARIABLE, "{}"))
    except ValueError:
        raise ConfigError(f"the variable {VARIABLE} is not ours", hint="unset it: evermark sets it by itself") from None
    return found if isinstance(found, dict) else {}
