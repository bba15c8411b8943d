"""Parallel models in training libraries. Each module needs its library, so none is imported here."""
