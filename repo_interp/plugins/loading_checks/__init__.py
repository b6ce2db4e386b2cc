"""Checks of a model that was loaded."""
