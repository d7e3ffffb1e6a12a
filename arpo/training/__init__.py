"""Training runs: the loop over sampling and updates, samplers, checkpoints, collapse detection, supervised fine-tuning.

May import every room except cluster, studies, plan, viewer, builtin and cli.
"""
