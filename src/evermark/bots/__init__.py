"""Bots: subscriptions that speak for a user of some streams. See docs/bots.md."""
