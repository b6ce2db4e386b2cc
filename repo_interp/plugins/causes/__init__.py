"""Causal role of heads' positions: effects of changed positions, and saliency."""
