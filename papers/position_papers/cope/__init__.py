"""CoPE (Golovneva et al. 2024): claims C1 to C6."""
