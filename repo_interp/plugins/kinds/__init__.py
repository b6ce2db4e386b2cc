"""What the positions of each kind of heads are for."""
