"""The viewer: a local page that shows runs, their curves and their rollout trees, and an export of it as one file."""
