-- What `evermark log missing --give-up` took out of a partition, last of all, for clients of the live tail. `times` only
-- grows, and so does its sum with the id of the last recovery that left events out: that is the number of what they are
-- told last, whichever of the two comes later.
create table given_up (
    source    text collate "C" not null,
    partition integer not null,
    times     bigint not null,
    said      text not null,
    at        timestamptz not null default clock_timestamp(),
    primary key (source, partition)
);
