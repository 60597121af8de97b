-- The live subscriptions are spread over shards. Each has a group: a row, whose lock is its lock, and cursors (reader '').
alter table delivery_group drop column id, add column shard integer not null default 0 primary key;
alter table subscriptions add column shard integer not null default 0;
alter table cursors add column shard integer not null default 0;
alter table cursors drop constraint cursors_pkey, add primary key (reader, shard, source, partition);
