"""Direct paths from heads to heads, and edges that are cut."""
