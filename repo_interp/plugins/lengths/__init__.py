"""Disturbed prompts, and prompts longer than the training length."""
