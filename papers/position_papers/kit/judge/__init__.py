"""From what was measured to verdicts: the one place that knows rules, tests and intervals.

differences     samples, the difference of two with its standard error, Holm's correction
rules           when a claim holds, as data that says itself in words
claims          a claim, the evidence on it, and the verdict of its rule
table           evidence as a CSV with every unit, and `judge(claim, table)`
outcomes        what the rows of verdicts on one claim come to
"""
