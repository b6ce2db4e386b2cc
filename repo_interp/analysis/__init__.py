"""The main job: prompts through a model, observed once, reduced to a run; scores of a model as a
run; what they leave in a directory.
"""
