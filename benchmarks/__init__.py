"""What the measures cost, beside the textbook way and beside the layer they look at. Run by `python -m benchmarks`."""
