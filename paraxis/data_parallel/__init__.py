"""Data parallelism beside tensor parallelism: replicated (DDP) or sharded (FSDP) parameters, gradient reduction."""
