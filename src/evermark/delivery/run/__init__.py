"""Delivery at work: the loop of its owner."""
