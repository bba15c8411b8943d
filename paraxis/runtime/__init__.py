"""What runs a parallel model: the compile backend, compiled calls, guards, Inductor, CUDA graphs, model methods."""
