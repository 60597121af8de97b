"""The `reliability:` section."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field, model_validator

from evermark.config.fields import Duration, Model, Whole, between, refusal
from evermark.config.problems import Problem

_BACKENDS = "evermark.checkpoints.kinds"  # by name: it stands on this package
_Short = Annotated[Duration, between(timedelta(milliseconds=10), timedelta(hours=1))]
_Long = Annotated[Duration, between(timedelta(seconds=1), timedelta(days=30))]


class CheckpointConfig(Model):
    """At the latest every `interval` or `event_count` events, whichever comes first."""

    backend: Literal["postgres", "memory", "etcd", "mongo"] = "postgres"
    interval: _Short = timedelta(seconds=5)
    event_count: Annotated[Whole, Field(ge=1, le=10_000_000)] = 1000


class DedupConfig(Model):
    enabled: bool = True
    cache_size: Annotated[Whole, Field(ge=1, le=10_000_000)] = 10_000
    ttl: _Long = timedelta(minutes=3)


class GapDetectionConfig(Model):
    """A jump of more than `max_gap` with evidence is a gap; up to `small_gap` it is read again, beyond it is stale."""

    enabled: bool = True
    max_gap: _Long = timedelta(minutes=5)
    small_gap: _Long = timedelta(hours=1)


class CircuitBreakerConfig(Model):
    """`threshold` failures in a row, then at least `timeout` until the next try; `suspend_after` of them suspend."""

    threshold: Annotated[Whole, Field(ge=1, le=1000)] = 5
    timeout: _Short = timedelta(seconds=30)
    suspend_after: Annotated[Whole, Field(ge=1, le=1000)] = 10


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

    def without_effect(self) -> Iterator[Problem]:
        """Keys of the file that are understood and change nothing in this version, if they are not as by default."""
        checkpoint = self.checkpoint
        if (checkpoint.interval, checkpoint.event_count) != (
            CheckpointConfig().interval,
            CheckpointConfig().event_count,
        ):
            yield Problem(
                ("checkpoint",), "interval and event_count have no effect: every batch ends with a checkpoint"
            )
        if self.dedup != DedupConfig():
            yield Problem(("dedup",), "it has no effect: each event is in the log once, always")
        if self.gap_detection != GapDetectionConfig():
            yield Problem(("gap_detection",), "it has no effect: gaps are found by positions, whatever their size")

    def unsupported(self) -> Iterator[Problem]:
        if self.checkpoint.backend not in importlib.import_module(_BACKENDS).BACKENDS:
            yield Problem(
                ("checkpoint", "backend"),
                "this checkpoint backend is not in this version",
                "use postgres (the default)",
            )
