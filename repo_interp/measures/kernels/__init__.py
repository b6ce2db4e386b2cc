"""The arithmetic below the measures: sums over causal pairs, solvers, moments, cells.

Torch in, torch out; no labels.
"""
