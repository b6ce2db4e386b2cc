"""How the groups of a run are drawn and tabulated, a file a group.

Knows labelled arrays; knows no page and no terminal.
"""
