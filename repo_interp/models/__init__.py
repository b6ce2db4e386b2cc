"""Everything that knows Hugging Face and TransformerLens.

    architectures, configuration    what a configuration says, and whether its family opens
    rotation, schemes, attention    how a stock attention module rotates, measured; a scheme attached to it
    reposition, load, bridge        layouts of schemes in a decoder; checkpoints; TransformerLens bridges
    capture, interventions, audit   observe, change, verify

Knows no task and no measure.
"""

from repo_interp.libraries import require

require("torch", "transformers", "transformer-lens")
