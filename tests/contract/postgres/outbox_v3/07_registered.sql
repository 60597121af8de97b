-- What the publication looked like when the slot began. An existing fingerprint stays: if it differs from what is there
-- now, rows may be missing, and that is mended, not overwritten.
update @schema@.readers set fingerprint = @schema@.publication_fingerprint(@publication_literal@)
where slot = @slot_literal@ and fingerprint is null;
select * from @schema@.maintain();
