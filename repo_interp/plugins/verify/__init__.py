"""Audits of a model, and of the tables of another runtime."""
