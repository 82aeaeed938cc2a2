"""Generations of training software, a TOML file each."""
