-- One reader goes; what others still read stays.
delete from @schema@.readers where slot = @slot_literal@;
