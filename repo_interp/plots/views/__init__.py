"""How the groups of a run are drawn and tabulated, a file a group.

This package knows labeled arrays; knows no page and no terminal.
"""
