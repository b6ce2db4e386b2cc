"""Scores on data sets that users have, as rows of tables of the RePo paper."""
