"""Parts of one logit of a head, and the attention pattern of the head."""
