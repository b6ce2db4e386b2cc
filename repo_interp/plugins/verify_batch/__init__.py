"""Whether prompts of a batch see each other, as they are given to a model."""
