"""Families that compute attention themselves."""
