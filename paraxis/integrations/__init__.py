"""Parallel models in the libraries that people train with. Each module needs its library, and none is imported here."""
