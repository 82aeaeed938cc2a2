"""Single-process mathematics of the networks' units."""
