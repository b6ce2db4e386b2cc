"""Attention inputs -> labelled statistics. Pure; knows no model, no task and no plot."""
