"""The running process: terminal, progress, interruption, memory, and processes side by side."""
