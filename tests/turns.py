"""Long tests take turns: `make test` runs a third of them, others with the next commit; `make test TURN=all` runs all.

They are more than half of all processor time, and they repeat at length, with real processes that die, what shorter
tests and the simulator show of each part. In each turn there is one of each row: of every kind of trouble, for one kind
of source. Three turns in a row have all of them, whatever the first one is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALL = "all"
VARIABLE = "TURN"

# Each row has tests that are alike, and columns take about the same time.
LONG = (
    (  # rows from before a stream are copied, with deaths on the way
        ("faults/test_copy.py", "test_x6_a_copy_that_is_killed_on_the_way_goes_on_and_is_exact"),
        ("faults/test_mongo_copy.py", "test_x6_a_copy_of_documents_that_is_killed_on_the_way_goes_on_and_is_exact"),
        ("faults/test_replica_source.py", "test_r13_a_copy_that_is_killed_on_the_way_goes_on_and_is_exact"),
    ),
    (  # what is copied and what is told are the same in the end
        ("faults/test_mongo_copy.py", "test_x6_history_lost_in_the_middle_of_a_copy_costs_no_document"),
        ("faults/test_oracle.py", "test_the_log_implies_what_a_native_subscriber_has"),
        ("faults/test_copy.py", "test_a_slot_that_is_lost_during_a_copy_loses_no_row"),
    ),
    (  # history that was lost is repaired, with deaths on the way
        (
            "faults/test_lost_slot.py",
            "test_p6_a_lost_slot_is_repaired_exactly_with_long_transactions_and_deaths_on_the_way",
        ),
        (
            "faults/test_lost_tables_slot.py",
            "test_p7_a_lost_slot_of_tables_is_repaired_by_itself_with_deaths_on_the_way",
        ),
        (
            "faults/test_mongo.py",
            "test_history_lost_while_nobody_read_is_repaired_by_itself_with_a_death_on_the_way_or_skipped_by_a_person",
        ),
    ),
    (  # and beside what goes on
        ("faults/test_replica_source.py", "test_r10_a_repair_that_is_killed_on_the_way_is_exact"),
        ("faults/test_lost_slot.py", "test_p6_one_of_several_slots_is_repaired_while_the_others_go_on"),
        ("faults/test_lost_tables_slot.py", "test_p7_a_dropped_table_is_mended_by_the_file_and_a_restart_alone"),
    ),
    (  # a reader is killed, and what it reads from
        ("faults/test_blocks.py", "test_a_redeployed_reader_misses_no_message_though_it_and_a_node_are_killed"),
        ("faults/test_bots.py", "test_d3_d15_a_redeployed_bot_misses_nothing_and_gets_nothing_before_its_key"),
        ("faults/test_replica_source.py", "test_r5_a_killed_reader_and_a_killed_node_lose_and_repeat_nothing"),
    ),
    (  # several machines
        ("faults/test_instances.py", "test_instances_share_the_partitions_and_take_over_from_each_other"),
        ("faults/test_cluster.py", "test_on_a_cluster_any_machine_may_die"),
        ("faults/test_instances.py", "test_instances_with_leases_in_etcd_step_down_without_it_and_come_back"),
    ),
    (  # what was there before, or went away
        ("faults/test_upgrade.py", "test_what_older_versions_left_is_taken_over_and_brought_up_to_date"),
        (
            "faults/test_other_database.py",
            "test_p11_a_cloned_a_restored_and_a_promoted_database_wait_for_a_persons_word",
        ),
        ("faults/test_object_store.py", "test_a_log_in_a_bucket_survives_a_kill_and_a_store_that_fails"),
    ),
    (
        ("faults/test_installed_again.py", "test_uninstalled_and_installed_again_goes_on_with_the_old_data_folder"),
        (
            "faults/test_installed_again.py",
            "test_installed_again_where_another_deployment_kept_the_outbox_misses_nothing",
        ),
        ("faults/test_lost_log.py", "test_a_log_that_is_lost_whole_begins_anew_with_what_the_source_has"),
    ),
    (
        ("faults/test_lost_log.py", "test_a_data_file_that_is_lost_or_damaged_is_put_back_or_given_up"),
        (
            "faults/test_checkpoint_store.py",
            "test_s13_an_etcd_that_is_killed_and_all_checkpoints_deleted_lose_and_double_nothing",
        ),
        ("faults/test_engine_dies.py", "test_delivery_goes_on_after_any_process_of_spark_was_killed_or_hangs"),
    ),
    (  # random histories, compared by Spark
        (
            "spark/ingest/test_tables_repair.py",
            "test_p7_a_lost_slot_of_tables_is_repaired_exactly[change_publication-0-0]",
        ),
        ("spark/ingest/test_tables_repair.py", "test_p7_a_lost_slot_of_tables_is_repaired_exactly[lose-99-0]"),
        ("spark/ingest/test_mongo_repair.py", "test_a_gap_is_closed_exactly_with_deletes_and_dropped_collections"),
    ),
    (
        ("spark/log/test_kept_table.py", "test_the_kept_table_is_the_table_from_scratch_at_every_step[0]"),
        ("spark/log/test_objects.py", "test_the_public_format_reads_the_store"),
        ("spark/delivery/test_bots.py", "test_a_replay_gives_a_bot_what_it_was_a_member_of"),
    ),
)
TURNS = len(LONG[0])


def turn_of(environ: Mapping[str, str] = os.environ) -> int | None:
    """Which turn it is: the number in `TURN`, or how many commits there are; None: all tests run."""
    said = environ.get(VARIABLE)
    if said == ALL:
        return None
    if not said:
        return _commits()
    if not said.isdecimal():
        raise SystemExit(f"{VARIABLE}={said}: neither a number nor {ALL!r}")
    return int(said)


def resting(turn: int | None) -> list[str]:
    """The long tests that do not run in this turn."""
    if turn is None:
        return []
    return [
        f"tests/{file}::{name}" for row in LONG for number, (file, name) in enumerate(row) if number != turn % TURNS
    ]


def _commits() -> int:
    """How many there are, or, outside of a repository, days."""
    try:
        done = subprocess.run(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, check=True)
        return int(done.stdout)
    except (OSError, subprocess.CalledProcessError, ValueError):
        return datetime.now(UTC).toordinal()
