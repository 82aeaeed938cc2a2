"""Training: text, batches, the loop around a step, and what a run leaves behind."""
