"""Logits as a sum of a number for the distance, one for the query and one for the key."""
