"""Which deployment a prefix in etcd belongs to.

Two deployments of one name have the same prefix, unless their files say otherwise.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable

from evermark.errors import ConfigError
from evermark.etcd.client import EtcdClient, in_base64

VERSION = 1


class Claim:
    """The key `<prefix>state` says for which State the keys beside it are (docs/formats.md). An instance that finds no
    such key puts its own there: keys from before are its own. Looked up until it is known; from then on remembered.
    """

    def __init__(self, etcd: EtcdClient, prefix: str, identity: Callable[[], str]) -> None:
        self._etcd, self._prefix, self._identity = etcd, prefix, identity
        self._is_ours = False

    def require(self) -> None:
        """Raises `ConfigError` when the prefix is another's."""
        if self._is_ours:
            return
        mine, key = self._identity(), in_base64(f"{self._prefix}state".encode())
        is_absent = {"key": key, "result": "EQUAL", "target": "VERSION", "version": "0"}
        value = in_base64(json.dumps({"v": VERSION, "state": mine}).encode())
        put, get = {"request_put": {"key": key, "value": value}}, {"request_range": {"key": key}}
        answer = self._etcd.transaction("claiming a prefix", [is_absent], [put], [get])
        if not answer.get("succeeded"):
            (found,) = answer["responses"][0]["response_range"]["kvs"]
            if _state(base64.b64decode(found["value"])) != mine:
                raise _refusal(self._etcd.section, self._prefix)
        self._is_ours = True


def require_readable(etcd: EtcdClient, prefix: str, doing: str, *, is_new: bool) -> None:
    """Raises if keys under the prefix cannot be read; or are another's, where a deployment has no State yet (`is_new`).
    Claims nothing.
    """
    if etcd.ask(doing, lambda client: client.get(f"{prefix}state")) and is_new:
        raise _refusal(etcd.section, prefix)


def _refusal(section: str, prefix: str) -> ConfigError:
    return ConfigError(
        f"{section}.prefix: the keys under {prefix} in etcd are those of another State",
        hint=f"two deployments share this etcd: give each a prefix of its own ({section}.prefix);"
        f" if that State is gone for good and this one replaces it: etcdctl del {prefix}state",
    )


def _state(value: bytes) -> str | None:
    try:
        found = json.loads(value)
        return str(found["state"]) if found["v"] == VERSION else None
    except (ValueError, KeyError, TypeError):
        return None
