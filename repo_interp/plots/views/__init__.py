"""Figures and tables of the groups of a run, one file per group.

This package knows labeled arrays, and no page and no terminal.
"""
