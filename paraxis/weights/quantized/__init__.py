"""Quantized checkpoints: which formats there are, which parameters they are of, reading and writing them."""
