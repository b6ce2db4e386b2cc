"""Audits of a model, a batch, a scheme, and the tables of another runtime."""
