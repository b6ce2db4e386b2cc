"""How a token gets a position, and how a position enters attention.

Pure torch; imports nothing of ours.
"""
