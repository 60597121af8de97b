"""Spark's Python daemon of an instance: with lanes loaded, too, so that the first one begins at once."""

from __future__ import annotations

from evermark.spark.cluster import prefer_installed_pyspark, unsealed_here

prefer_installed_pyspark()  # before anything of it is imported

import evermark.app.lane  # noqa: E402, F401 - what the workers that it forks will run
from evermark.spark import daemon  # noqa: E402

if __name__ == "__main__":
    daemon.run(unfit=unsealed_here())
