-- A gap so large (`gap_detection.small_gap`) that those who follow the events should take their state anew, though it
-- is closed: clients of the live tail are told, once each.
alter table recoveries add column large boolean not null default false;
