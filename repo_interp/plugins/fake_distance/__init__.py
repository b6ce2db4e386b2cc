"""Logits of one query at every distance, and maps of logits."""
