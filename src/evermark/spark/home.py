"""What makes Spark start quickly: a home without the zipped copy of PySpark, and an archive of the JVM's classes.

Spark puts `python/lib/pyspark.zip` first on the path of every Python process it starts. What is imported from a zip is
compiled each time, and half a dozen such processes come one after the other before the first event is read: half of
the time to start. Through a home that lacks the zip they import the package that is installed.

Loading Spark's classes from an archive takes less than half of the time. `evermark.spark.archive` makes the archive;
without one, a JVM that ends properly leaves one behind for the next start. The archive is a cache: safe to delete, made
anew for another Java, Spark or class path, and ignored by the JVM when it does not fit.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import psutil
import pyspark

from evermark.embedded.java import cache_folder

_PARTS = ("bin", "jars", "sbin")


def spark_home(master: str) -> Path:
    """The SPARK_HOME to start with: the user's own, PySpark's own when others share it, else one that is quick."""
    installed = Path(pyspark.__file__).resolve().parent
    if given := os.environ.get("SPARK_HOME"):
        return Path(given)
    if not master.startswith(("local", "spark://")):
        return installed  # what goes to YARN and Kubernetes is sent from there, the zip included
    home = cache_folder() / f"spark-home-{hashlib.sha256(str(installed).encode()).hexdigest()[:12]}"
    try:
        home.mkdir(parents=True, exist_ok=True)
        for part in _PARTS:  # two processes may link it at once, and it may be there from another time
            link, target = home / part, installed / part
            if not link.is_symlink() or link.readlink() != target:
                fresh = link.with_name(f"{part}.{os.getpid()}")
                fresh.symlink_to(target)
                fresh.replace(link)
    except OSError:
        return installed  # a home that cannot be written to costs seconds at each start, nothing else
    return home


def java_options(java_home: str, home: Path) -> str:
    """The JVM's options for using the archive, or for leaving one behind at its end."""
    try:
        archive = archive_of(java_home, home)
        archive.parent.mkdir(parents=True, exist_ok=True)
        adopt(archive)
        if archive.exists():
            return f"-XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
        return f"-XX:ArchiveClassesAtExit={archive}.{os.getpid()} -Xlog:cds=off -Xlog:cds+dynamic=off"
    except OSError:
        return ""  # a home that cannot be written to costs a few seconds at each start, nothing else


def archive_of(java_home: str, home: Path) -> Path:
    # A conda or virtual environment moved to another place has another class path: its archive would be refused.
    # The bundled Java is used through a folder of each deployment's own, whose parts are links: the runtime counts.
    runtime = (Path(java_home) / "lib").resolve().parent
    what = f"{runtime}|{pyspark.__version__}|{home}"
    return cache_folder() / f"spark-{hashlib.sha256(what.encode()).hexdigest()[:12]}.jsa"


def adopt(archive: Path) -> None:
    """Take over the archive of an earlier JVM; a JVM that still runs may still be writing."""
    for left in archive.parent.glob(f"{archive.name}.*"):
        pid = left.suffix[1:]
        if not (pid.isdigit() and psutil.pid_exists(int(pid))):
            left.replace(archive)
