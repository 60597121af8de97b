-- A parked event holds back later ones of its key, where its subscription wants order: of its own stream alone, since
-- two streams of a source may use the same keys.
alter table enqueued_messages add column stream text collate "C" not null default '';
-- Text cannot hold NUL, and JSON may: it is replaced, as it is where rows are parked.
update enqueued_messages
set stream = coalesce(regexp_replace(event, '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g')::json ->> 'stream', '');
alter table enqueued_messages alter column stream drop default;
drop index enqueued_messages_held;
create index enqueued_messages_held on enqueued_messages (subscription, source, partition, stream, key, id)
    where key is not null;
