"""Measures, experiments and views of ours, a folder a subject; the core imports none of them."""
