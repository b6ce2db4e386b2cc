"""Runs side by side: aligned by labels, with what cannot be compared, and their tables, figures and page."""
