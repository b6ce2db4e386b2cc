"""Measurement of positions during training."""
