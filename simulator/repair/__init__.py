"""A Postgres in memory whose slots are lost, and the steps that repair them, under faults. See docs/simulator.md."""
