"""Cost of reusing a chunk of cached text at another offset."""
