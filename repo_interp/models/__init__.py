"""Everything that knows Hugging Face and TransformerLens. Knows no task and no measure."""

from repo_interp.libraries import require

require("torch", "transformers", "transformer-lens")
