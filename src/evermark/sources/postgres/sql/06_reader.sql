-- Who reads, and what the publication looked like when the slot began. An existing fingerprint stays: if it differs
-- from what is there now, rows may be missing, and that is for `evermark source recover` to settle.
insert into @schema@.readers (slot, publication, fingerprint)
values (@slot_literal@, @publication_literal@, @schema@.publication_fingerprint(@publication_literal@))
on conflict (slot) do nothing;
select * from @schema@.maintain();
