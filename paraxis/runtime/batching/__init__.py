"""Continuous batching: requests that arrive and end at any time are computed together, on a paged KV cache."""
