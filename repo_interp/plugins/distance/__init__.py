"""How heads use the distance: stability, symbols, octaves, massive activations."""
