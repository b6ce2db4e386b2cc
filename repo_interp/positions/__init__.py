"""Assign positions to tokens, and use positions in attention.

Pure torch: this package imports no other part of repo_interp.
"""
