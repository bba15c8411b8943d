"""Small tools that know nothing of tensors' placements: the cache on disk, progress, memory of the process."""
