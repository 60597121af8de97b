-- What waits for session keys has limits of its own, by stream, and may be much.

drop index enqueued_messages_waiting;
create index enqueued_messages_waiting on enqueued_messages (subscription, session, id) include (stream, created_at)
    where waits;
create index enqueued_messages_waiting_by_stream on enqueued_messages (subscription, stream, id) include (replay_id)
    where waits;

-- What counts for a subscription's limit.
create index enqueued_messages_counted on enqueued_messages (subscription, replay_id) include (stream, session)
    where not waits;
