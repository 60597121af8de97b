-- When the node's history of a stream was last replaced (restored, recreated, a fork accepted), in microseconds since
-- 1970; 0: never. Events made before may be in the log though the node lost them: sent again, they are compared with it.
alter table block_streams add column restored_us bigint not null default 0;
alter table block_plan add column restored_us bigint;
