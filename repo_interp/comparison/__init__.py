"""Runs side by side, aligned by labels, with notes on differences that forbid a comparison."""
