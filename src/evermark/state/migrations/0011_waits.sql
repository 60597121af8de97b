-- A person asked for a parked delivery to be tried now. That spends no attempt: if it fails, the row goes back to the
-- time it had (null: it was dead).
alter table enqueued_messages add column asked boolean not null default false, add column scheduled_at timestamptz;

-- Since when a replay gets nowhere with a subscription; null: it moves, or its turn has not come.
alter table replay_targets add column stuck_since timestamptz;
