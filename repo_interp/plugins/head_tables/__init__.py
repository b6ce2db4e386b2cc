"""A table with a row per head, and the files of other libraries."""
