"""Analysis of evaluation results: heads behind a failing cell."""
