"""Whether a position scheme is causal, and computes the same in every way of running it."""
