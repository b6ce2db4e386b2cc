"""Positions while a model is trained."""
