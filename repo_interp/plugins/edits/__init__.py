"""What edits of a model cost: the loss of every token, with and without them."""
