"""Pairs that turn slowly and dominate, and the closed form of their sum."""
