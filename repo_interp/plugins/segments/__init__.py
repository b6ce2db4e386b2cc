"""Whether positions follow lines, sentences and examples."""
