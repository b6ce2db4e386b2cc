"""Runs side by side: aligned by labels, with notes on what cannot be compared, and their tables,
figures and page.
"""
