"""``paraxis serve``: a parallel model as an OpenAI-compatible HTTP service, with continuous batching over its ranks."""
