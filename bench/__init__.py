"""Benchmarks: `python -m bench NAME --json [--scale S]`. What is measured, and how, stands in docs/bench.md."""
