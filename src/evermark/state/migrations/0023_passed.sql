-- Up to where a source was read behind its last batch, with nothing to take: it may have forgotten all of that. So the
-- log's head knows it, too, wherever checkpoints are kept and whatever becomes of them.
alter table log_head add column passed text not null default '';
