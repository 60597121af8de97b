"""Delivery: from batches of the log to receivers.

One delivery, step by step, through its five types:

1. `decide.backlog.next_span` (for a fresh batch, ingest) makes a `Span`: events of one partition after a `Cursor`.
2. `run.live` and `run.follower` make an `Assignment` of it for each subscription, for a `Deliverer`.
3. `spark.deliver` reads the rows that a subscription wants, and makes a `Job` of them for a `Sink`.
4. The sink (`webhook`) posts, and returns a `Result` for each batch of the job.
5. `work.fold` adds the results up to one `Outcome` for each assignment; the store settles it: the cursor moves, refused
   events are parked.

Parked events are sent again by `run.parked_retries`, from the store and without Spark.

Folders: `decide` (pure decisions), `run` (live group, follower, retries), `store` (Postgres and memory), `replay` (past
events again), `webhook` (the sink), `bots` (memberships and session keys), `tail` (live clients). Files: `model` has
the values, `limits` the waits and bounds, `ports` the contracts of stores, `work` the pieces of work. Imports between
them point one way (`make lint`).
"""
