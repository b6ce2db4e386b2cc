"""Linear probe of the token index in the residual stream."""
