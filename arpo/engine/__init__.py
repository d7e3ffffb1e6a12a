"""Engines: they generate tokens from a prefix, with log-probs and entropies.

`base` is the protocol, `local/` an engine in this process that shares the trainer's weights, `vllm/` two engines over
vLLM, `scripted` a Python function in place of a model. May import models and the rooms below it.
"""
