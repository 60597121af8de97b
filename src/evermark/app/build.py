"""The only module that wires: from the settings file to objects that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from evermark.breaker import Breaker, BreakerLimits
from evermark.checkpoints.base import CheckpointStore
from evermark.checkpoints.kinds import CheckpointConfig, backend_of, open_checkpoints
from evermark.cluster.base import Holder, LeaseStore
from evermark.cluster.holding import LeaseLimits
from evermark.cluster.kinds import LeaseConfig, open_leases
from evermark.cluster.liveness import this_process
from evermark.cluster.members import member_of
from evermark.config import BotConfig, Config
from evermark.delivery.decide.retry import EndpointLimits
from evermark.delivery.model import SourcePartition, SubscriptionSpec
from evermark.delivery.replay.postgres import PostgresReplays
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.store.postgres_bots import bot_inboxes, bot_users, bot_users_version
from evermark.embedded.address import EmbeddedDsn
from evermark.embedded.postgres import EmbeddedPostgres
from evermark.errors import ConfigError, UnreachableError
from evermark.ingest.checkpoint_saver import SavePolicy
from evermark.ingest.copying.postgres import StateCopies, copies_in_state
from evermark.ingest.dedup import RecentLimits
from evermark.ingest.gaps import GapLimits
from evermark.ingest.limits import ReadingLimits
from evermark.ingest.repair.postgres import Recoveries
from evermark.log.head import PostgresHeads
from evermark.log.read import LogReader
from evermark.predicate import match_sql, vet
from evermark.secrets import Hidden, Plain, Sealed, SecretBox, key_for
from evermark.sources.base import Source
from evermark.sources.kinds import BotReaders, SourceContext, kind_of
from evermark.state.connection import State, schema_for
from evermark.state.migrate import migrate
from evermark.storage import Place, place_of, storage_of, trouble_is_said
from evermark.storage.access import remember

# An HTTP client is better told to come back than kept waiting.
CONNECT_TIMEOUT_S = 3.0
COPIES = "_copies"  # beside the logs: a process that reads the logs can read the files of copies


@dataclass(frozen=True)
class LaneParts:
    """What a lane is given to build the same deployment in its own process. Picklable, secrets sealed."""

    name: str
    instance: str  # whose lanes they are
    state_dsn: Hidden
    box: SecretBox
    checkpoint: CheckpointConfig
    leases: LeaseConfig
    endpoints: EndpointLimits
    reading: ReadingLimits
    log_root: Place
    retention: timedelta
    sources: dict[str, Source]
    specs: list[SubscriptionSpec]


@dataclass
class Stores:
    """Everything that owners of sources and of delivery work with, open."""

    box: SecretBox
    state: State
    leases: LeaseStore
    lease_limits: LeaseLimits
    heads: PostgresHeads
    checkpoints: CheckpointStore
    store_breaker: Breaker  # of the store of checkpoints
    reading: ReadingLimits
    delivery: PostgresDelivery
    replays: PostgresReplays
    recoveries: Recoveries
    copies: StateCopies
    holder: Holder
    log_root: Place
    retention: timedelta
    sources: dict[str, Source]
    specs: list[SubscriptionSpec]

    def log_folder(self, source: str) -> Place:
        return self.log_root / source

    def batch_at(self, place: SourcePartition, since: str) -> int:
        """The last batch of a place before a time."""
        return LogReader(self.log_folder(place.source)).batch_at(place.partition, since)

    def close(self) -> None:
        self.state.close()


@dataclass(kw_only=True)
class Deployment(Stores):
    """A deployment as `evermark up` and the command line have it. `close` gives it all back."""

    config: Config
    warnings: list[str] = field(default_factory=list)
    embedded: EmbeddedPostgres | None = None

    def another_state(self, *, connections_max: int, timeout_s: float, lock_timeout_s: float) -> State:
        """State through other connections: callers of it and callers of `state` do not wait for each other."""
        embedded, dsn = self.embedded, self.config.state.dsn
        return State(
            embedded.dsn if dsn is None and embedded is not None else (lambda: dsn.reveal() if dsn is not None else ""),
            self.state.schema,
            connections_max=connections_max,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            statement_timeout_s=timeout_s,
            lock_timeout_s=lock_timeout_s,
        )

    def checkpoints_through(self, state: State) -> CheckpointStore:
        """The same checkpoints through the connections of `state`."""
        settings = self.config.reliability.checkpoint
        return open_checkpoints(settings, state) if backend_of(settings).durable else self.checkpoints

    def leases_through(self, state: State) -> LeaseStore:
        """The same leases through the connections of `state`."""
        return open_leases(self.config.cluster.leases, state)

    def for_lanes(self) -> LaneParts:
        config = self.config
        return LaneParts(
            config.name,
            member_of(self.holder.instance),
            state_dsn(config, self.box),
            self.box,
            config.reliability.checkpoint.sealed(self.box),
            config.cluster.leases.sealed(self.box),
            endpoint_limits(config),
            self.reading,
            self.log_root,
            self.retention,
            self.sources,
            self.specs,
        )

    def close(self) -> None:
        super().close()
        if self.embedded is not None:
            self.embedded.stop()


def open_deployment(config: Config, sources: Mapping[str, Source] | None = None) -> Deployment:
    """Open state (starting the embedded one where none is named), bring it up to date, and build what stands on it."""
    log_root = log_place(config)
    config.data.mkdir(parents=True, exist_ok=True)
    key, warning = key_for(config.secrets.key, config.data, shared_state=config.state.dsn is not None)
    box = SecretBox(key)
    given = dict(sources or {})
    dsn = cache(lambda: state_dsn(config, box))  # one for all: by it they know that their State is the same
    built = {name: given.pop(name) if name in given else make_source(config, name, box, dsn) for name in config.sources}
    built.update(given)
    for where, error in unfit(config, built):
        raise ConfigError(f"{where.removesuffix('.where')}: {error.message}", hint=error.hint) from error
    specs = [each.to_spec(name, box) for name, each in [*config.subscriptions.items(), *config.bots.items()]]
    embedded, state = open_state(config)
    try:
        migrate(state)
    except BaseException:
        state.close()
        if embedded is not None:
            embedded.stop()
        raise
    return Deployment(
        **_stores(
            state, config.reliability.checkpoint, config.cluster.leases, endpoint_limits(config), reading_limits(config)
        ),
        config=config,
        box=box,
        holder=this_process(),
        log_root=log_root,
        retention=config.log.retention,
        sources=built,
        specs=specs,
        warnings=[warning] if warning else [],
        embedded=embedded,
    )


def open_in_lane(parts: LaneParts, attempt: str) -> Stores:
    """The stores of a deployment in a process of Spark's: State runs, and is up to date. `attempt` tells the holders of
    leases apart: a process may run several lanes, one after another.
    """

    def dsn() -> str:
        try:
            return parts.state_dsn.open()
        except UnreachableError as error:  # an embedded server that the driver has not started again yet
            raise UnreachableError(f"state does not answer: {error.message}", hint=error.hint) from error

    state = State(dsn, schema_for(parts.name))
    holder = replace(this_process(), instance=f"{parts.instance}/{attempt}")
    return Stores(
        **_stores(state, parts.checkpoint, parts.leases, parts.endpoints, parts.reading),
        box=parts.box,
        holder=holder,
        log_root=parts.log_root,
        retention=parts.retention,
        sources=parts.sources,
        specs=parts.specs,
    )


def _stores(
    state: State,
    checkpoint: CheckpointConfig,
    leases: LeaseConfig,
    endpoints: EndpointLimits,
    reading: ReadingLimits,
) -> dict[str, Any]:
    return {
        "state": state,
        "leases": open_leases(leases, state),
        "lease_limits": leases.limits,
        "heads": PostgresHeads(state),
        "checkpoints": open_checkpoints(checkpoint, state),
        "store_breaker": Breaker(reading.breaker),
        "reading": reading,
        "delivery": PostgresDelivery(state, limits=endpoints),
        "replays": PostgresReplays(state),
        "recoveries": Recoveries(state),
        "copies": StateCopies(state),
    }


def endpoint_limits(config: Config) -> EndpointLimits:
    breaker = config.reliability.circuit_breaker
    return EndpointLimits(breaker.threshold, breaker.timeout.total_seconds(), breaker.suspend_after)


def reading_limits(config: Config) -> ReadingLimits:
    """Where checkpoints are in State each is saved with the log's head, at no cost: nothing waits there."""
    all_of_it = config.reliability
    checkpoint, dedup, gaps = all_of_it.checkpoint, all_of_it.dedup, all_of_it.gap_detection
    last_s = all_of_it.shutdown.checkpoint_timeout.total_seconds()
    waits = SavePolicy(checkpoint.interval.total_seconds(), checkpoint.event_count, last_s)
    max_gap_s = gaps.max_gap.total_seconds()
    return ReadingLimits(
        waits if backend_of(checkpoint).outside else SavePolicy(last_s=last_s),
        BreakerLimits(all_of_it.circuit_breaker.threshold, all_of_it.circuit_breaker.timeout.total_seconds()),
        RecentLimits(dedup.cache_size, dedup.ttl.total_seconds()) if dedup.enabled else None,
        GapLimits(gaps.enabled, max_gap_s, max(max_gap_s, gaps.small_gap.total_seconds())),
    )


def unfit(config: Config, sources: Collection[str]) -> Iterator[tuple[str, ConfigError]]:
    """What is wrong with subscriptions and bots, and where: no delivery job must meet a predicate that is refused."""
    for section, named in (("subscriptions", config.subscriptions), ("bots", config.bots)):
        for name, each in named.items():
            if isinstance(each, BotConfig) and each.source not in sources:
                hint = f"there are {', '.join(sorted(sources))}"
                yield f"{section}.{name}.source", ConfigError(f"no source is called {each.source}", hint=hint)
            try:
                match_sql(each.streams, [op.value for op in each.ops], vet(each.where), lambda _: "null")
            except ConfigError as error:
                yield f"{section}.{name}.where", error


def log_place(config: Config) -> Place:
    """Where the logs are. How a bucket is reached is known from now on, here and in processes that are started here."""
    place = place_of(config.log_path)
    if isinstance(place, Path):
        return place.absolute()
    remember(place.root, config.storage.access())
    storage_of(place)  # what is missing for it, a library or a secret, is said now and here
    return place


def make_source(config: Config, name: str, box: SecretBox | None, dsn: Callable[[], Hidden] | None = None) -> Source:
    """A source as the file describes it. Without a `box` its secrets are not sealed, and it stays in this process."""
    settings = config.sources[name]
    return kind_of(settings, name).make(settings, source_context(config, name, box, dsn))


def source_context(
    config: Config, name: str, box: SecretBox | None, dsn: Callable[[], Hidden] | None = None
) -> SourceContext:
    bots = BotReaders(bot_users, bot_inboxes, bot_users_version)
    place = place_of(config.log_path)
    folder = (place.absolute() if isinstance(place, Path) else place) / COPIES / name
    return SourceContext(
        name, box, dsn or (lambda: state_dsn(config, box)), schema_for(config.name), bots, copies_in_state, folder
    )


def state_dsn(config: Config, box: SecretBox | None) -> Hidden:
    """The DSN of State, fit to travel to the processes of Spark: sealed, or without a secret in it."""
    dsn = config.state.dsn
    if dsn is None:
        return EmbeddedDsn(embedded_folder(config))
    return Plain(dsn.reveal()) if box is None else Sealed.seal(dsn.reveal(), box)


def embedded_folder(config: Config) -> Path:
    return (config.data / "state").absolute()


def open_state(config: Config) -> tuple[EmbeddedPostgres | None, State]:
    """State as it is, not brought up to date; with the server to stop afterwards where it is an embedded one."""
    schema = schema_for(config.name)
    dsn = config.state.dsn
    if dsn is not None:
        return None, State(dsn.reveal, schema)
    server = EmbeddedPostgres(embedded_folder(config))
    with trouble_is_said(server.folder):
        server.start()
    return server, State(server.dsn, schema)  # asked for each time: a server that was started again may have moved
