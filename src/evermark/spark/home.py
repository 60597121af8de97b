"""A home for Spark without its zipped copy of PySpark.

Spark puts `python/lib/pyspark.zip` first on the path of every Python process it starts. What is imported from a zip is
compiled each time, and half a dozen such processes come one after the other before the first event is read: half of
the time to start. Through a home that lacks the zip they import the package that is installed.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pyspark

from evermark.embedded.java import cache_folder

_PARTS = ("bin", "jars", "sbin")


def spark_home(master: str) -> Path:
    """The SPARK_HOME to start with: the user's own, PySpark's own when others share it, else one that is quick."""
    installed = Path(pyspark.__file__).resolve().parent
    if given := os.environ.get("SPARK_HOME"):
        return Path(given)
    if not master.startswith("local"):
        return installed
    home = cache_folder() / f"spark-home-{hashlib.sha256(str(installed).encode()).hexdigest()[:12]}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        for part in _PARTS:
            _link(home / part, installed / part)
    except OSError:
        return installed  # a home that cannot be written to costs seconds at each start, nothing else
    return home


def _link(link: Path, target: Path) -> None:
    """Two processes may make it at once, and it may be there from another time."""
    if link.is_symlink() and link.readlink() == target:
        return
    fresh = link.with_name(f"{link.name}.{os.getpid()}")
    fresh.symlink_to(target)
    fresh.replace(link)
