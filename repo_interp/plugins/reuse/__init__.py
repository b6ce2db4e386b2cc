"""What it costs to reuse a chunk of cached text at another offset."""
