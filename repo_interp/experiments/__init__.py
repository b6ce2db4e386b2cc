"""What needs several forward passes. Brings together models, tasks and measures; prints nothing."""
