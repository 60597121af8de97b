"""Where leases are kept: in State, or in etcd. What a backend needs is imported when it is opened."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal, Self

from evermark.cluster.base import LeaseStore
from evermark.cluster.holding import LeaseLimits
from evermark.errors import SetupError
from evermark.etcd.settings import EtcdConfig
from evermark.secrets import SecretBox
from evermark.settings.fields import Duration, Model, between

if TYPE_CHECKING:
    from evermark.etcd.client import EtcdClient
    from evermark.state.connection import State

# Of a lease's time, what all endpoints together may take to answer: a renewal that hangs ends before the lease does.
_ANSWER_SHARE = 0.25
_ANSWER_S_MIN, _ANSWER_S_MAX = 0.3, 3.0


class LeaseConfig(Model):
    """A lease is good for `ttl` by the clock of the backend; its holder renews it four times as often, but not when its
    loop has not gone on for `hang`.
    """

    backend: Literal["postgres", "etcd"] = "postgres"
    ttl: Annotated[Duration, between(timedelta(seconds=2), timedelta(minutes=10))] = timedelta(seconds=10)
    hang: Annotated[Duration, between(timedelta(seconds=20), timedelta(hours=1))] = timedelta(
        seconds=LeaseLimits.hangs_after_s
    )
    etcd: EtcdConfig = EtcdConfig()

    def sealed(self, box: SecretBox) -> Self:
        """With every secret sealed: the form that may travel to the processes of Spark."""
        return self.model_copy(update={"etcd": self.etcd.sealed(box)})

    @property
    def limits(self) -> LeaseLimits:
        return LeaseLimits(self.ttl.total_seconds(), hangs_after_s=self.hang.total_seconds())


def look_at_leases(settings: LeaseConfig, schema: str, *, is_new: bool) -> None:
    """Raise if the store, which is another server than that of State, cannot be used. State is not asked: it may not be
    there yet (`is_new`), or be away.
    """
    client, prefix = _etcd(settings, schema)
    from evermark.etcd.claim import require_readable

    require_readable(client, prefix, "reading leases", is_new=is_new)


def open_leases(settings: LeaseConfig, state: State) -> LeaseStore:
    if settings.backend == "postgres":
        from evermark.cluster.postgres import PostgresLeases
        from evermark.cluster.together import RenewedTogether

        return RenewedTogether(PostgresLeases(state))
    client, prefix = _etcd(settings, state.schema)
    from evermark.cluster.etcd import EtcdLeases

    return EtcdLeases(client, prefix, state)


def _etcd(settings: LeaseConfig, schema: str) -> tuple[EtcdClient, str]:
    if importlib.util.find_spec("etcd3gw") is None:
        raise SetupError("cluster.leases.backend: etcd needs etcd3gw", hint="pip install 'evermark[etcd]'")
    from evermark.etcd.client import EtcdClient

    answer_s = _ANSWER_SHARE * settings.limits.ttl_s / len(settings.etcd.endpoints)
    client = EtcdClient(settings.etcd, "cluster.leases.etcd", min(_ANSWER_S_MAX, max(_ANSWER_S_MIN, answer_s)))
    return client, settings.etcd.prefix or f"/{schema}/leases/"
