"""What a model's units cost: the kernels they run, counted from shapes; no torch."""
