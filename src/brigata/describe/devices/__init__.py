"""Devices, a TOML file each. ``tools/fit_devices.py`` writes them."""
