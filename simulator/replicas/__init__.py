"""Replicas that meet over links that drop, repeat and reorder; restored, evicted and bootstrapped at any time."""
