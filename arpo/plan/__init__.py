"""Capacity planning (`arpo plan`): predict the time and memory of a training step on other hardware.

Closed forms for one decode step and one update (`cost`), a simulation of sampling (`simulate`), and a search over
splits of the GPUs (`planner`). No torch. May import: types, errors, config, runs.
"""
