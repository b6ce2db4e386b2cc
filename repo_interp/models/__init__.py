"""Everything that knows Hugging Face's modules and TransformerLens.

    configuration, checkpoints      a decoder from its files, strictly
    rotation, schemes, attention    how a stock attention module rotates, measured; a scheme attached to it
    reposition, load, bridge        layouts of schemes in a decoder; checkpoints; TransformerLens bridges
    capture, audit                  observe, verify

Knows no task and no measure. What its files state is read in `checkpoint_files`; what changes a
pass stands in `interventions`.
"""

from repo_interp.libraries import require

require("torch", "transformers", "transformer-lens")
