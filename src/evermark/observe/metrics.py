"""The metrics, under names that dashboards will use for years."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# A metric by its name here, and its labels. Thousands of them come from a lane at once.
Labelled = tuple[str, tuple[str, ...]]

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_PLACE = ("source", "partition")


class Metrics:
    """One registry per process, made where the process is wired; nothing global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._totals: dict[tuple[str, str], int] = {}
        self._of_ingest()
        self._of_delivery()
        self._of_tail()
        self._of_upkeep()

    def set_all(self, gauges: Mapping[Labelled, float], gone: Iterable[Labelled] = ()) -> None:
        """Set the gauges that changed, and remove the gauges that are `gone`."""
        for (name, labels), value in gauges.items():
            getattr(self, name).labels(*labels).set(value)
        for name, labels in gone:
            getattr(self, name).remove(*labels)

    def add_all(self, counts: Mapping[Labelled, float]) -> None:
        for (name, labels), number in counts.items():
            getattr(self, name).labels(*labels).inc(number)

    def raise_to(self, counter: str, label: str, total: int) -> None:
        """A counter whose total is kept elsewhere. Lanes follow each other, and each would count from nothing."""
        grown = total - self._totals.get((counter, label), 0)
        if grown >= 0:
            getattr(self, counter).labels(label).inc(grown)
            self._totals[counter, label] = total

    def _of_ingest(self) -> None:
        self.events_taken = self._counter("events_taken", "Events logged and durable", *_PLACE)
        self.batches_taken = self._counter("batches_taken", "Log commits", *_PLACE)
        self.duplicates_dropped = self._counter("duplicates_dropped", "Events the log held already", *_PLACE)
        self.checkpoints_saved = self._counter("checkpoints_saved", "Checkpoints saved", *_PLACE)
        self.checkpoint_errors = self._counter("checkpoint_errors", "Checkpoints that could not be saved", *_PLACE)
        self.checkpoints_away = self._gauge("checkpoints_away", "1 while they cannot be saved", "source")
        self.checkpoint_seconds = self._histogram("checkpoint_seconds", "Saving a checkpoint", "source")
        self.dedup_cache = self._gauge("dedup_cache_size", "Ids of events kept in memory", "source")
        self.breaker = self._gauge("breaker_state", "1 for the state a breaker is in", "of", "source", "state")
        self.take_seconds = self._histogram("take_seconds", "Commit, fsync, head and checkpoint of one batch", "source")
        self.partition_restarts = self._counter(
            "partition_restarts", "Times a partition's reading was started again", *_PLACE
        )
        self.partition_up = self._gauge("partition_up", "1 while a partition is being read", *_PLACE)
        self.partition_lag_s = self._gauge(
            "partition_lag_seconds",
            "How long the oldest event has been waiting that the source has and the log has not; 0: there is none",
            *_PLACE,
        )
        self.partition_state = self._gauge("partition_state", "1 for the state it is in", *_PLACE, "state")
        self.gaps = self._counter("gaps", "Gaps found in a source", *_PLACE)
        self.resyncs = self._counter("resyncs", "Gaps so large that followers should take their state anew", *_PLACE)
        self.gaps_accepted = self._counter("gaps_accepted", "Gaps that a person chose to leave open", *_PLACE)
        self.recovered = self._counter("events_recovered", "Events taken to close a gap", *_PLACE)
        self.copy_rows = self._counter("copy_rows", "Rows of copies that are in the log", "source")
        self.copy_chunks_left = self._gauge(
            "copy_chunks_left", "Chunks of copies that are not in the log yet", "source"
        )
        self.source_gauge = self._gauge("source_gauge", "What a source says of itself, by name", "source", "name")
        self.log_head = self._gauge("log_head", "Last durable batch", *_PLACE)
        self.controls_ignored = self._counter(
            "controls_ignored", "Control events that asked for nothing this program knows", "source"
        )

    def _of_delivery(self) -> None:
        self.delivered = self._counter("events_delivered", "Events accepted by a receiver", "subscription")
        self.attempts = self._counter(
            "delivery_attempts",
            "Deliveries tried, retries too, by what came of it",
            "subscription",
            "outcome",
        )
        self.parked = self._counter("events_parked", "Deliveries set aside", "subscription")
        self.expired = self._counter("events_expired", "Events given up because of their age, ever", "subscription")
        self.dropped = self._counter("events_dropped", "Parked deliveries given up by a person, ever", "subscription")
        self.failures = self._counter(
            "delivery_failures", "Pieces of work that did not finish, by fate", "subscription", "fate"
        )
        self.lag_batches = self._gauge("subscription_lag_batches", "Batches not yet passed", "subscription")
        self.lag_events = self._gauge(
            "subscription_lag_events", "Events of the log not yet passed, wanted or not", "subscription"
        )
        self.oldest_s = self._gauge(
            "subscription_oldest_seconds", "Age of the oldest event not yet delivered; 0: there is none", "subscription"
        )
        self.kept_events = self._gauge(
            "subscription_kept_events",
            "Events older than log.retention that the log keeps because of this subscription; absent: none",
            "subscription",
        )
        self.delivery_lag_s = self._gauge(
            "delivery_lag_seconds",
            "How long the log has had a batch the live group has not passed; 0: there is none",
        )
        self.state = self._gauge("subscription_state", "1 for the state it is in", "subscription", "state")
        self.queue_rows = self._gauge("parked_rows", "Rows of enqueued_messages", "subscription", "state")
        self.handovers = self._counter("handovers", "Fresh batches delivered at once, or left behind", "result")
        self.replays_running = self._gauge("replays_running", "Replays that are under way", "source")
        self.replay_delivered = self._counter(
            "replay_delivered", "Events of replays accepted by a receiver", "subscription"
        )
        self.keys_asked = self._counter(
            "session_keys_asked", "Session keys asked for, by what was answered", "subscription", "outcome"
        )

    def _of_tail(self) -> None:
        self.tail_clients = self._gauge("tail_clients", "Clients of the live tail")
        self.tail_events_sent = self._counter("tail_events_sent", "Events sent to clients of the live tail")
        self.tail_fallbacks = self._counter(
            "tail_fallbacks", "Times a client of the live tail was too slow, and read the log for itself"
        )
        self.tail_resyncs = self._counter(
            "tail_resyncs", "Times clients of the live tail were told that events are missing", "reason"
        )

    def _of_upkeep(self) -> None:
        self.engine_restarts = self._counter("engine_restarts", "Times Spark died under this process")
        self.lease_held = self._gauge("lease_held", "1 while this instance holds it", "name")
        self.refused = self._counter("stale_writes_refused", "Writes under a lease that another instance had", "name")
        self.hanging = self._counter("hanging_loops", "Leases let go of because their loop did not go on", "name")
        self.log_unwell = self._gauge("log_unwell", "1 while something is wrong with its log", "source", "what")
        self.care = self._counter("log_care", "Files and commits tidied away", "what")

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"evermark_{name}", meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, *labels: str) -> Histogram:
        return Histogram(f"evermark_{name}", meaning, labels, buckets=_SECONDS, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"evermark_{name}", meaning, labels, registry=self.registry)
