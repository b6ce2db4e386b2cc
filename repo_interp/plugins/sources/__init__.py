"""Sources of learned positions (the output of f_phi), and kinds of heads."""
