"""Results of evaluations: the cell that fails."""
