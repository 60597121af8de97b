"""What is counted and measured, under the names a dashboard will use for years."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """One registry per process, made where the process is wired; nothing global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        place = ["source", "partition"]
        self.events_taken = Counter("evermark_events_taken", "Events logged and durable", place, registry=self.registry)
        self.batches_taken = Counter("evermark_batches_taken", "Log commits", place, registry=self.registry)
        self.duplicates_dropped = Counter(
            "evermark_duplicates_dropped", "Events the log held already", place, registry=self.registry
        )
        self.checkpoints_saved = Counter(
            "evermark_checkpoints_saved", "Checkpoints saved", place, registry=self.registry
        )
        self.take_seconds = Histogram(
            "evermark_take_seconds",
            "Commit, fsync, head and checkpoint of one batch",
            ["source"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.partition_restarts = Counter(
            "evermark_partition_restarts",
            "Times a partition's reading was started again",
            place,
            registry=self.registry,
        )
        self.partition_up = Gauge(
            "evermark_partition_up", "1 while a partition is being read", place, registry=self.registry
        )
        self.log_head = Gauge("evermark_log_head", "Last durable batch", place, registry=self.registry)
        self.delivered = Counter(
            "evermark_events_delivered", "Events accepted by a receiver", ["subscription"], registry=self.registry
        )
        self.parked = Counter(
            "evermark_events_parked", "Deliveries set aside", ["subscription"], registry=self.registry
        )
        self.failures = Counter(
            "evermark_delivery_failures",
            "Pieces of work that did not finish, by fate",
            ["subscription", "fate"],
            registry=self.registry,
        )
        self.lag_batches = Gauge(
            "evermark_subscription_lag_batches", "Batches not yet passed", ["subscription"], registry=self.registry
        )
        self.queue_rows = Gauge(
            "evermark_parked_rows", "Rows of enqueued_messages", ["subscription", "state"], registry=self.registry
        )
        self.handovers = Counter(
            "evermark_handovers",
            "Fresh batches delivered at once, or left to the follower",
            ["result"],
            registry=self.registry,
        )
        self.lease_held = Gauge(
            "evermark_lease_held", "1 while this instance holds it", ["name"], registry=self.registry
        )
        self.care = Counter("evermark_log_care", "Files and commits tidied away", ["what"], registry=self.registry)
