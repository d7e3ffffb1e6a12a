"""The viewer: a local page that shows runs, their curves and rollout trees, and an export of it as one HTML file.

May import: types, errors, config, figures, runs and, inside functions, studies. Loads without torch.
"""
