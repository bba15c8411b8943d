"""Private and version-dependent APIs of torch and transformers, one function per need, with the versions seen."""
