"""Values that attention moves: their norms, and an edit of them."""
