"""The run directory and everything that follows a run: saved trees, locks, trackers, the reporter.

May import: types, errors, config, net, figures.
"""
