"""Test whether the documents of a batch see each other."""
