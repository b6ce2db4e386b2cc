"""Train small models on tasks, and the checkpoints that come with the package. Knows no measure and no plot; prints nothing."""
