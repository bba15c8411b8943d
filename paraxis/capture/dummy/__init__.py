"""Dummy inputs for text, images, videos and audio, derived from a model's signature and configuration."""
