"""Spark's Python daemon with our imports done before it forks: workers start warm and share the pages."""

from __future__ import annotations

import aiohttp  # noqa: F401
import numpy as np  # noqa: F401
import psycopg  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401
from pyspark import daemon

if __name__ == "__main__":
    daemon.manager()
