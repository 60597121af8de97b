"""The operator's file, evermark.yaml: `load` reads it, `Config` is what it says."""

from __future__ import annotations

from evermark.config.bots import BotConfig
from evermark.config.loading import load
from evermark.config.models import (
    Config,
    LogConfig,
    SecretsConfig,
    ServerConfig,
    SparkConfig,
    StateConfig,
    TokenConfig,
)
from evermark.config.reliability import ReliabilityConfig
from evermark.config.subscriptions import SubscriptionConfig
from evermark.sources.own_class import CustomSource
from evermark.sources.settings import SourceConfig

__all__ = [
    "BotConfig",
    "Config",
    "CustomSource",
    "LogConfig",
    "ReliabilityConfig",
    "SecretsConfig",
    "ServerConfig",
    "SourceConfig",
    "SparkConfig",
    "StateConfig",
    "SubscriptionConfig",
    "TokenConfig",
    "load",
]
