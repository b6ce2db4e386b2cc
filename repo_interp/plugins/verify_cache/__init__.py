"""Find the position of every key of a cache."""
