-- A gap so large (`gap_detection.small_gap`) that those who follow the events should take their state anew, though it
-- is closed: clients of the live tail are told, once each.
alter table recoveries add column large boolean not null default false;

-- Up to when the requests that a subscription's `rate` allows, or a replay's for it, are given away, by this database's
-- clock: whoever wants to send takes the next stretch. Worth half a second, so it need not survive a crash.
create unlogged table rates (
    subscription text collate "C" not null references subscriptions (name) on delete cascade,
    replay_id    text collate "C" not null,
    free_at      timestamptz not null,
    primary key (subscription, replay_id)
);
