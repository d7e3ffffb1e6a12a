"""Figures: the common matplotlib style, and the picture of a rollout tree.

Other rooms draw their own figures with `arpo.figures.style`. matplotlib is optional (extra `figures`) and is imported
only when something is drawn. May import: types, errors, config, net.
"""
