"""Training on trees: forward and backward passes over shared prefixes, the optimizer, checkpoints; `dist/` has FSDP2.

May import: types, errors, config, runs, models, algorithm. Nothing heavy is imported until a module is used.
"""
