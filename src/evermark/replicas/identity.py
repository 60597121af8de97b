"""Whether a database is the one this node left: a copy or a backup must not go on under the same origin.

Each start leaves a new token both in the database and in the node's own folder. A database that was restored, or that is
a copy which another node went on with, has an older token than the folder: it goes on under a new origin. The new token
is noted in the folder before it is written to the database, so that a crash in between looks like what it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from evermark.replicas.base import ReplicaStore


@dataclass(frozen=True)
class Tokens:
    """What the folder keeps: the token that the database has, or will have in a moment."""

    now: str = ""
    next: str = ""


def claim(store: ReplicaStore, kept: Tokens, keep: Callable[[Tokens], None], fresh_origin: Callable[[], str]) -> bool:
    """Make the database this node's; whether it had to take a new origin."""
    origin, token = store.identity()
    is_other = not origin or token not in {kept.now, kept.next} or not token
    following = secrets.token_hex(16)
    if is_other:
        store.renew(fresh_origin())
    keep(Tokens(token, following))
    store.set_token(following)
    keep(Tokens(following))
    return is_other
