"""Axes of 3-D positions: the axis by which each rotary pair turns, and positions of keys on each."""
