"""From measurements to verdicts: rules, tests and intervals.

differences     samples, the difference of two with its standard error, Holm's correction
rules           conditions of claims, as data with a text for each
claims          a claim, the evidence on it, and the verdict of its rule
table           evidence as a CSV with every unit, and `judge(claim, table)`
outcomes        the joint verdict of the rows on one claim
"""
