"""Applies a layout to a model, from outside: mesh, tensor parallelism, data parallelism."""
