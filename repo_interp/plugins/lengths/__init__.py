"""Prompts that are disturbed, and longer than the training length."""
