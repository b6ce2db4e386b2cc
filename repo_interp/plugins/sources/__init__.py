"""What learned positions follow: the sources of f_phi, and the kinds of heads."""
