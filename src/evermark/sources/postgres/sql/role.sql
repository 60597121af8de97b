-- The least a reading role needs. Choose the password yourself:
--   create role @role@ login replication password '…';
grant usage on schema @schema@ to @role@;
-- All tables: after a slot was lost the partitions of events are read one by one, those to come as well.
grant select on all tables in schema @schema@ to @role@;
alter default privileges in schema @schema@ grant select on tables to @role@;
grant update (replay_from_ts, replay_to_ts) on @schema@.streams to @role@;
grant execute on function @schema@.publication_fingerprint(name), @schema@.maintain(interval, integer),
    @schema@.note_floor(name, xid8), @schema@.note_mended(name) to @role@;
-- From version 16 on, and worth having (a superuser must grant it): an idle slot lets go of old WAL sooner.
--   grant execute on function pg_catalog.pg_log_standby_snapshot() to @role@;
-- A role of your application that calls emit():
--   grant usage on schema @schema@ to app;
--   grant execute on function @schema@.emit(text, text, jsonb) to app;
