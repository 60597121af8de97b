"""Whether a database is the one this node left: a copy or a backup must not go on under the same origin.

Each start leaves a new token both in the database and in the node's own folder, and so does a node that is about to
tell others of events it has made or taken since. A database that was restored, or is a copy which another node went on
with, has an older token than the folder: it goes on under a new origin. The new token is noted in the folder before it
is written to the database, so that a crash in between looks like what it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

from evermark.replicas.base import ReplicaStore
from evermark.replicas.event import born_ms


@dataclass(frozen=True)
class Tokens:
    """What the folder keeps: the token that the database has, or will have in a moment."""

    now: str = ""
    next: str = ""
    origin: str = ""  # the last one this node has had: the next is born later, whatever its clock says


def claim(
    store: ReplicaStore,
    kept: Tokens,
    keep: Callable[[Tokens], None],
    fresh_origin: Callable[[str], str],
    *,
    anew: bool = False,
) -> bool:
    """Make the database this node's; whether it had to take a new origin. `anew`: a person says that it has to."""
    origin, token = store.identity()
    is_stale = not origin or token not in {kept.now, kept.next} or not token
    is_other = is_stale or anew
    following = secrets.token_hex(16)
    if is_other:
        origin = fresh_origin(max(kept.origin, origin, key=born_ms))
        keep(replace(kept, origin=origin))
        store.renew(origin, is_noted=is_stale)
    keep(Tokens(token, following, origin))
    store.set_token(following)
    keep(Tokens(following, "", origin))
    store.token_kept()
    return is_other
