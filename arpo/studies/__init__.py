"""Studies: `compare` (algorithms on equal budgets) and `entropy` (where a model is uncertain, what branching gains).

Functions return values and take a callback for progress; nothing here prints. May import: every room up to training.
"""
