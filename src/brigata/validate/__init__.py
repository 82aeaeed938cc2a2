"""Predictions beside published measurements: tables in, errors by source, device, framework and kind out."""
