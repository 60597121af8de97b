"""A block-stream server: durable append-only streams over HTTP. `docs/blocknode.md` is its specification."""
