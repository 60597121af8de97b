-- The first event that a subscription has not got whose endpoint fails: from there it goes on when the endpoint is back.
create table failovers (
    subscription text collate "C" primary key,
    generation   bigint not null,                      -- of the subscription: a later one may have its name
    source       text collate "C" not null,
    partition    integer not null,
    batch        bigint not null,
    event_id     text collate "C" not null,
    since        timestamptz not null default clock_timestamp()  -- when the failover was seen first
);

-- healthy, failover (with the event it goes on from) or replay (with its window), for each subscription.
create view stream_status as
select s.name as subscription,
       case when failing then 'failover' when r.id is not null then 'replay' else 'healthy' end as status,
       case when failing then f.event_id end as checkpoint_event_id,
       case when failing then f.since end as failover_since,
       case when not failing then r.since end as replay_from,
       case when not failing then r.until end as replay_to
from subscriptions s
cross join lateral (select s.failures > 0 or s.state = 'disabled' as failing) is_so
left join failovers f on f.subscription = s.name and f.generation = s.generation
left join lateral (
    select r.id, r.since, r.until
    from replays r
    left join replay_targets t on t.replay = r.id and t.subscription = s.name and t.generation = s.generation
    where (r.state = 'waiting' and (r.subscription is null or r.subscription = s.name))
       or (r.state = 'running' and t.state = 'running')
    order by r.nth
    limit 1
) r on true;
