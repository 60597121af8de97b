-- Who had a lease last: a lane that is renewed lets go for a moment, and its instance gets the lease back.
-- And under which epoch its partition was found to be without a gap: before that, nothing leaves the log.
alter table leases
    add column last_instance text,
    add column checked_epoch bigint not null default 0;

update leases set last_instance = instance;
