"""Spark's Python daemon of an instance: with lanes loaded, too, so that the first one begins at once."""

from __future__ import annotations

import evermark.app.lane  # noqa: F401 - what the workers that it forks will run
from evermark.spark import daemon

if __name__ == "__main__":
    daemon.run()
