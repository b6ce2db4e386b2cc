"""What attention moves: norms of values, and an edit of them."""
