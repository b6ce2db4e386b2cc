"""One logit of one head in its parts, and its attention pattern."""
