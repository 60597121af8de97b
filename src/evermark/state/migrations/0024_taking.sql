-- The batch that a repair takes just now, and how many events it has. Whoever tries next sees by the log whether it was
-- taken: a process may have ended right behind the commit, and what it took is counted all the same.
alter table recoveries
    add column taking_batch bigint not null default 0,
    add column taking_rows bigint not null default 0;
