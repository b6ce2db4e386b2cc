"""Everything that knows Hugging Face and TransformerLens. Knows no task and no measure."""
