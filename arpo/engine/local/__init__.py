"""The local engine: continuous batching with a prefix cache, in this process, on a CPU or a GPU."""
