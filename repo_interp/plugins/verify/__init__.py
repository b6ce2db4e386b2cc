"""Audits of a model, a scheme, and the tables of another runtime."""
