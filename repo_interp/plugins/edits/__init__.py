"""Cost of edits of a model: the loss of every token, with and without them."""
