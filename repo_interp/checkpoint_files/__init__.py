"""The files of a checkpoint: where they are, what they state, what they hold.

Knows no model, no task and no measure.

directories, stored, fetched            where a checkpoint is, which files it has, where fetched models are kept
stated, fields, options, released       what its configuration states, checked
architectures, transformers_source      what its family is, read from the source of transformers
gguf_header, gguf_metadata              the same of a GGUF file
inspected                               all of that, for `repo-interp inspect`; up to here nothing loads torch
weights, gguf                           its tensors; a GGUF file as a checkpoint
"""
