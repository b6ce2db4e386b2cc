"""Position Generalization (2025): claims P1 to P7."""
