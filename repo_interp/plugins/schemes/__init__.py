"""Our position schemes, by name."""
