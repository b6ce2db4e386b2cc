"""The running process: terminal, progress, interruption, memory, and parallel processes."""
