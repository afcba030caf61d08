"""Where a run's figures go: terminal, JSONL file, Weights & Biases."""
