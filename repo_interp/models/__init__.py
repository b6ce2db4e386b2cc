"""Everything that knows Hugging Face's modules and TransformerLens.

    configuration, checkpoints      a decoder from its files, strictly; saving writes them
    rotation, schemes, attention    how a stock attention module rotates, measured; its scheme
    reposition, load, bridge        layouts of schemes in a decoder; checkpoints; bridges
    capture, audit                  observe, verify

This package knows no task and no measure. The files of a checkpoint are read in `checkpoint_files`;
`interventions` changes a pass.
"""

from repo_interp.runtime.libraries import require

require("torch", "transformers", "transformer-lens")
