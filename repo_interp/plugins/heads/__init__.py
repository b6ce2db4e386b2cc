"""What every head does: scores, names, and models with random weights as controls."""
