"""Components that write a learned position into the hidden state, or an attention logit."""
