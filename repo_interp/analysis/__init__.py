"""The main job: prompts through a model, reduced to a run; also scores and results on disk."""
