"""What the residual stream knows of the token index."""
