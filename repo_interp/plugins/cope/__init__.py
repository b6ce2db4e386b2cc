"""CoPE's gates."""
