-- Up to where a source was read behind its last batch, with nothing to take: it may have forgotten all of that. So the
-- log's head knows it, too, wherever checkpoints are kept and whatever becomes of them. `passed_batch` is the batch
-- behind which that was: a program of before moves the head, and leaves the two as they are.
alter table log_head
    add column passed text not null default '',
    add column passed_batch bigint not null default 0;
