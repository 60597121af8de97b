-- The reader, before its slot: whatever had ended by now is not for it. It counts as installed when the slot is there.
insert into @schema@.readers (slot, publication, floor, floor_system)
select @slot_literal@, @publication_literal@, pg_snapshot_xmin(pg_current_snapshot()), system_identifier
from pg_control_system()
on conflict (slot) do nothing;
