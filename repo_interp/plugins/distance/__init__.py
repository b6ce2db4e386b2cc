"""Use of the distance by heads: stability, symbols, octaves, massive activations."""
