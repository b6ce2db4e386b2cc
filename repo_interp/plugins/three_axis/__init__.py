"""Logits as a sum of a function of the distance and values of query and key; one logit explained."""
