"""The whole of evermark.yaml (version 1, see docs/formats.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializeAsAny,
    ValidationInfo,
    model_validator,
)

from evermark.checkpoints.kinds import CheckpointConfig
from evermark.cluster.kinds import LeaseConfig
from evermark.config.bots import BotConfig
from evermark.config.spark_master import not_for_a_cluster
from evermark.config.subscriptions import SubscriptionConfig
from evermark.delivery.decide.retry import LIMITS as ENDPOINT_LIMITS
from evermark.errors import ConfigError
from evermark.ingest.gaps import GapLimits
from evermark.secrets import KeyRef, Secret
from evermark.settings.fields import NAME, Duration, Model, Whole, between, postgres_dsn, refusal
from evermark.settings.problems import nearest
from evermark.sources.kinds import KINDS, kind_named
from evermark.sources.settings import SourceConfig
from evermark.storage.access import Access
from evermark.storage.base import SCHEMES

VERSION = 1
TOKEN_CHARS_MIN = 24

_Name = Annotated[str, Field(pattern=NAME)]
_Short = Annotated[Duration, between(timedelta(milliseconds=10), timedelta(hours=1))]
_Long = Annotated[Duration, between(timedelta(seconds=1), timedelta(days=30))]

_GAPS = GapLimits()
_URL = re.compile(r"([^/]*)://(.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,254}", re.ASCII)
_KEY = re.compile(r"([A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*)?/*", re.ASCII)
_ENDPOINT = re.compile(r"https?://(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253})(:\d{1,5})?/?", re.ASCII)
_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9_.-]{1,253}):(\d{1,5})", re.ASCII)


def _folder(value: Any) -> Any:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value:
        raise refusal("expected the path of a local folder")
    return _local_path(value)


def _local_path(text: str) -> str:
    if _URL.fullmatch(text) or "\0" in text:
        raise refusal("expected the path of a local folder", hint="only log.path may be s3://, gs:// or az://")
    return text


def _log_path(text: str) -> str:
    match = _URL.fullmatch(text)
    if match is None:
        return _local_path(text)
    if match[1] not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise refusal(f"expected a local path or one of {known}", hint="a local folder is written as its path alone")
    bucket, _, path = match[2].partition("/")
    if not bucket or ("@" in match[2] and match[1] in ("s3", "gs")):
        raise refusal("expected a bucket and a path, without a user or password", hint="for example s3://acme/shop")
    if not _BUCKET.fullmatch(bucket) or not _KEY.fullmatch(path):
        raise refusal(
            "a bucket and the path in it have letters, digits and . _ = - alone", hint="for example s3://acme/shop"
        )
    return text.rstrip("/")


def _endpoint(text: str) -> str:
    if not _ENDPOINT.fullmatch(text):
        raise refusal("expected http://host:port or https://host, without a user, a path or a query")
    return text.rstrip("/")


def _listen(text: str) -> str:
    match = _LISTEN.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise refusal("expected host:port, for example 127.0.0.1:8320 or [::1]:8320")
    return text


def _conf_value(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (int, float)) else value


def _key_ref(value: Any) -> KeyRef:
    if isinstance(value, KeyRef):
        return value
    raise refusal("a key is given by reference only", hint="write ${file:/run/secrets/evermark} or ${EVERMARK_KEY}")


class LogConfig(Model):
    path: Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_log_path)] | None = None
    retention: Annotated[Duration, between(timedelta(hours=1), timedelta(days=36_500))] = timedelta(days=30)


_Ref = Annotated[KeyRef, PlainValidator(_key_ref), PlainSerializer(str)]


class StorageConfig(Model):
    """How the bucket of log.path is reached. What is not said comes from the environment's own chain."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    endpoint: Annotated[str, Field(max_length=300), AfterValidator(_endpoint)] | None = None
    region: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")] | None = None
    access_key: _Ref | None = None
    secret_key: _Ref | None = None
    path_style: bool = True

    @model_validator(mode="after")
    def _both_keys(self) -> StorageConfig:
        for one, other in (("access_key", "secret_key"), ("secret_key", "access_key")):
            if getattr(self, one) is not None and getattr(self, other) is None:
                raise refusal(f"is required beside {one}", hint="give both, or neither", at=(other,))
        return self

    def access(self) -> Access:
        return Access(self.endpoint, self.region, self.access_key, self.secret_key, self.path_style)


class StateConfig(Model):
    """Without a dsn, state lives in an embedded Postgres."""

    dsn: Annotated[Secret, AfterValidator(postgres_dsn)] | None = None


class SecretsConfig(Model):
    """Where the key is; the key itself is read only where it is used."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    key: _Ref | None = None


# Each needs two of Spark's slots while it is renewed; the others are for backlog, replays and repair. How many slots
# there are is compared where the master is known (`spark_master.require_slots`).
LANES_MAX = 64
SOURCES_MAX = 10_000
CORES_MAX = 100_000


class SparkConfig(Model):
    master: Annotated[str, Field(min_length=1, max_length=1024)] = "local[16,4]"
    lane: Annotated[Duration, between(timedelta(seconds=1), timedelta(hours=1))] = timedelta(minutes=5)
    lanes: Annotated[int, Field(ge=1, le=LANES_MAX)] = 1
    cores: Annotated[int, Field(ge=1, le=CORES_MAX)] | None = None  # of a cluster, at most
    python: Annotated[str, Field(min_length=1, max_length=1024)] | None = None  # of the executors
    conf: Annotated[
        dict[str, Annotated[str, BeforeValidator(_conf_value), Field(max_length=10_000)]], Field(max_length=500)
    ] = Field(default_factory=dict)


def _bearer(secret: Secret) -> Secret:
    text = secret.reveal()
    if not TOKEN_CHARS_MIN <= len(text) <= 512 or not text.isascii() or not text.isprintable() or " " in text:
        raise refusal(
            f"expected {TOKEN_CHARS_MIN} to 512 printable characters without spaces",
            hint='make one with: python -c "import secrets; print(secrets.token_urlsafe(32))"',
        )
    return secret


def _token(value: Any) -> Any:
    return {"token": value} if isinstance(value, (str, Secret)) else value


class TokenConfig(Model):
    """Who may use the HTTP API. Written as the token alone, it may do everything."""

    token: Annotated[Secret, AfterValidator(_bearer)]
    may: Literal["read", "everything"] = "everything"


def _one_owner(tokens: dict[str, TokenConfig]) -> dict[str, TokenConfig]:
    seen: set[Secret] = set()
    for name, given in tokens.items():
        if given.token in seen:
            raise refusal("this token stands here twice", hint="give each name its own", at=(name,))
        seen.add(given.token)
    return tokens


class ServerConfig(Model):
    listen: Annotated[str, AfterValidator(_listen)] = "127.0.0.1:8320"
    tokens: Annotated[
        dict[_Name, Annotated[TokenConfig, BeforeValidator(_token)]],
        Field(max_length=100),
        AfterValidator(_one_owner),
    ] = Field(default_factory=dict)

    @property
    def host(self) -> str:
        return self.listen.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.listen.rpartition(":")[2])


class DedupConfig(Model):
    """Ids that were logged of late, kept in memory: an aid beside the log, which holds each id once in any case."""

    enabled: bool = True
    cache_size: Annotated[Whole, Field(ge=1, le=10_000_000)] = 10_000
    ttl: _Long = timedelta(minutes=3)


class GapDetectionConfig(Model):
    """A jump of more than `max_gap` with evidence is a gap. Beyond `small_gap` tail clients are told to resync."""

    enabled: bool = True
    max_gap: _Long = timedelta(seconds=_GAPS.max_gap_s)
    small_gap: _Long = timedelta(seconds=_GAPS.small_gap_s)


class CircuitBreakerConfig(Model):
    """`threshold` failures in a row, then at least `timeout` until the next try; `suspend_after` of them suspend."""

    threshold: Annotated[Whole, Field(ge=1, le=1000)] = ENDPOINT_LIMITS.threshold
    timeout: _Short = timedelta(seconds=ENDPOINT_LIMITS.timeout_s)
    suspend_after: Annotated[Whole, Field(ge=1, le=1000)] = ENDPOINT_LIMITS.suspend_after


class ShutdownConfig(Model):
    flush_timeout: _Short = timedelta(seconds=10)
    checkpoint_timeout: _Short = timedelta(seconds=5)


class ReliabilityConfig(Model):
    checkpoint: CheckpointConfig = CheckpointConfig()
    dedup: DedupConfig = DedupConfig()
    gap_detection: GapDetectionConfig = GapDetectionConfig()
    circuit_breaker: CircuitBreakerConfig = CircuitBreakerConfig()
    shutdown: ShutdownConfig = ShutdownConfig()

    @model_validator(mode="after")
    def _gaps_are_ordered(self) -> ReliabilityConfig:
        gap = self.gap_detection
        # A `max_gap` that was raised alone pushes the default of `small_gap` along; two given ones must agree.
        if gap.small_gap < gap.max_gap and "small_gap" in gap.model_fields_set:
            raise refusal("must not be less than max_gap", at=("gap_detection", "small_gap"))
        return self


class ClusterConfig(Model):
    """How the instances of a deployment share the work."""

    leases: LeaseConfig = LeaseConfig()


def _source(value: Any, info: ValidationInfo) -> SourceConfig:
    """The settings of one source, by its type."""
    if isinstance(value, SourceConfig):
        return value
    if not isinstance(value, dict):
        raise refusal("expected a mapping of keys to values", hint="begin with: type: postgres")
    name, choice = value.get("type"), f"one of {', '.join(KINDS)}, or package.module:Class"
    if name is None:
        raise refusal("is required", hint=choice, at=("type",))
    kind = kind_named(name)
    if kind is not None:
        found: SourceConfig = kind.settings.model_validate(value, context=info.context)
        return found
    near = nearest(name, KINDS) if isinstance(name, str) else None
    raise refusal(f"expected {choice}", hint_showing_value=f"did you mean {near}?" if near else "", at=("type",))


class Config(Model):
    """What the file says, complete: paths absolute, variables filled in, defaults set."""

    version: Literal[1]
    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,30}$")]
    data: Annotated[Path, BeforeValidator(_folder)] = Path("evermark-data")
    log: LogConfig = LogConfig()
    storage: StorageConfig = StorageConfig()
    state: StateConfig = StateConfig()
    secrets: SecretsConfig = SecretsConfig()
    spark: SparkConfig = SparkConfig()
    server: ServerConfig = ServerConfig()
    sources: Annotated[
        dict[_Name, Annotated[SerializeAsAny[SourceConfig], PlainValidator(_source)]], Field(max_length=SOURCES_MAX)
    ] = Field(default_factory=dict)
    subscriptions: Annotated[dict[_Name, SubscriptionConfig], Field(max_length=10_000)] = Field(default_factory=dict)
    bots: Annotated[dict[_Name, BotConfig], Field(max_length=10_000)] = Field(default_factory=dict)
    reliability: ReliabilityConfig = ReliabilityConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _one_of_each_name(self) -> Config:
        for name in self.bots.keys() & self.subscriptions.keys():
            text = "a subscription has this name already, and a bot is one too"
            raise refusal(text, hint="rename one of them", at=("bots", name))
        return self

    @model_validator(mode="after")
    def _storage_is_of_a_bucket(self) -> Config:
        if self.storage.model_fields_set and not (self.log.path or "").startswith("s3://"):
            text = "it says how a bucket of S3 is reached, and log.path names none"
            raise refusal(text, hint="write log: {path: s3://bucket/path}, or leave storage out", at=("storage",))
        return self

    def not_for_a_cluster(self) -> Iterator[tuple[str, ConfigError]]:
        """What executors on other machines could not reach: the key of the file, and what to write instead."""
        return not_for_a_cluster(
            self.spark.master,
            self.spark.conf,
            log_path=self.log_path,
            state=self.state.dsn,
            key=self.secrets.key,
            store_keys={
                "storage.access_key": self.storage.access_key,
                "storage.secret_key": self.storage.secret_key,
            },
        )

    @property
    def log_path(self) -> str:
        """Where the log is: an absolute local path or a url."""
        return self.log.path or str(self.data / "log")
