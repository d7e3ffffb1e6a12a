"""Studies: `compare` (algorithms on equal budgets), `entropy` (where a model is uncertain, what branching gains) and
`signal` (how much of each algorithm's gradient is signal, before training).

Functions return values and take a callback for progress; nothing here prints. May import: every room up to training.
"""
