-- How far a reader is inside the batch after its cursor: all of it up to and with this position is done.
alter table cursors add column through text collate "C" not null default '';

-- Finds what is due of each subscription by itself, so that one with much of it does not hold up the others; what
-- replays parked comes after all else.
create index enqueued_messages_due_of
    on enqueued_messages (subscription, ((replay_id <> '')::integer), next_attempt_at, id)
    where next_attempt_at is not null;

-- One of a session that was put back untried keeps its time, by which the session is in order, and rests until then.
alter table enqueued_messages add column rests_until timestamptz;
