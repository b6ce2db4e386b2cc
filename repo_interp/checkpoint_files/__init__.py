"""The files of a checkpoint: their places, statements and weights.

This package knows no model, no task and no measure.

directories, stored, fetched        places of checkpoints, their files, fetched models
stated, fields, options, released   config.json, checked
architectures, transformers_source  families, read from the source of transformers
readers                             files of other formats, such as GGUF, as directories
inspected                           all of that, for `repo-interp inspect`; no module up to
                                    here loads torch
weights                             its tensors
"""
