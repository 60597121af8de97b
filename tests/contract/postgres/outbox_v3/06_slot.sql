-- The slot comes after the publication (which decoding looks up as of each change) and before the triggers (so that no
-- captured change precedes it). It must stand in a transaction of its own that wrote nothing.
do $do$
begin
    if not exists (select from pg_catalog.pg_replication_slots where slot_name = @slot_literal@) then
        if current_setting('server_version_num')::int >= 170000 then
            perform pg_catalog.pg_create_logical_replication_slot(@slot_literal@, 'pgoutput', false, false, true);
        else
            perform pg_catalog.pg_create_logical_replication_slot(@slot_literal@, 'pgoutput', false, false);
        end if;
    end if;
end $do$;
