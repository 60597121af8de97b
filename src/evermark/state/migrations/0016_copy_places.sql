-- Chunks of a source whose stream takes no marks are placed here: behind the horizon, as far as reading may have come.
create table copy_horizons (
    source   text primary key,
    position text collate "C" not null
);
-- Partitions whose rows of a chunk are in the log, though those of others were lost and are written again.
alter table copy_chunks add column told integer[] not null default '{}';
