"""What is measured on real machines: networks, runs and what they took."""
