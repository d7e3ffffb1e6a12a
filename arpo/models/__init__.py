"""Models: finding, loading, saving and exporting them, LoRA adapters, GGUF files, and the forward pass that trainer and
engine share (`network`). May import from types, errors, config, net, figures, runs, data, tools and rewards.
"""
