"""Compare runs, aligned by labels, with notes on differences that prevent a comparison."""
