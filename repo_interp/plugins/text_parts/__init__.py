"""Text parts of larger models."""
