"""Use of the positions of each kind of heads."""
