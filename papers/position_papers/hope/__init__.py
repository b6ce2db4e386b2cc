"""HoPE (Chen et al. 2025): claims H1 to H7."""
