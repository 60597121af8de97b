-- A parked event that changed its record's key holds back later ones of both keys, where its subscription wants order.
alter table enqueued_messages add column previous_key text collate "C";
create index enqueued_messages_held_left on enqueued_messages (subscription, source, partition, stream, previous_key, id)
    where previous_key is not null;
