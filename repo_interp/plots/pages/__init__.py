"""The page of a run: its frame, the explorer of positions, its scripts."""
