"""RePo (Li et al. 2026): claims R1 to R9."""
