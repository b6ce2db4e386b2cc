"""Recipes, one a paper: each figure or claim as data, a verdict by a rule that was there before the data, and a drawing."""
