-- Lists what waits for a person without reading all that waits for its time.
create index enqueued_messages_dead on enqueued_messages (id) where next_attempt_at is null;
