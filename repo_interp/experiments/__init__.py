"""Measurements that need several forward passes. Brings together models, tasks and measures; prints nothing."""
