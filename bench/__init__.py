"""Benchmarks: `python -m bench NAME --json [--scale S] [--against REVISION]`; what they measure is in docs/bench.md."""
