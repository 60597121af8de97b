"""The operator's file, evermark.yaml: `load` reads it, `Config` is what it says."""

from __future__ import annotations

from evermark.config.bots import BotConfig
from evermark.config.loading import load
from evermark.config.models import Config, LogConfig, TokenConfig
from evermark.config.subscriptions import SubscriptionConfig
from evermark.sources.own_class import CustomSource

__all__ = ["BotConfig", "Config", "CustomSource", "LogConfig", "SubscriptionConfig", "TokenConfig", "load"]
