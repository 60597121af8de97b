"""The `reliability:` section."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import Field, model_validator

from evermark.checkpoints.kinds import CheckpointConfig
from evermark.settings.fields import Duration, Model, NotYet, Whole, between, refusal

_Short = Annotated[Duration, between(timedelta(milliseconds=10), timedelta(hours=1))]
_Long = Annotated[Duration, between(timedelta(seconds=1), timedelta(days=30))]
_DEDUP = NotYet("nothing reads this key in this version: each event is in the log once, always")
_GAPS = NotYet("nothing reads this key in this version: gaps are found by positions, whatever their size")


class DedupConfig(Model):
    enabled: Annotated[bool, _DEDUP] = True
    cache_size: Annotated[Whole, Field(ge=1, le=10_000_000), _DEDUP] = 10_000
    ttl: Annotated[_Long, _DEDUP] = timedelta(minutes=3)


class GapDetectionConfig(Model):
    """A jump of more than `max_gap` with evidence is a gap; up to `small_gap` it is read again, beyond it is stale."""

    enabled: Annotated[bool, _GAPS] = True
    max_gap: Annotated[_Long, _GAPS] = timedelta(minutes=5)
    small_gap: Annotated[_Long, _GAPS] = timedelta(hours=1)


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
