"""Atlas of heads: scores, names, and models with random weights as controls."""
