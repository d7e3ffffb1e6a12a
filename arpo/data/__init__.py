"""Tasks, traces and benchmarks: reading them from files or the hub, and the order in which training takes tasks.

May import: types, errors, config, net, figures, runs.
"""
