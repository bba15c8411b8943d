"""Small tools without knowledge of placements: the cache on disk, names, sizes, progress, process memory."""
