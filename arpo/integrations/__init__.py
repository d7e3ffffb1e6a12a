"""Rollout trees in other people's trainers, and trees in formats that others read.

    trl           `TreeGRPOTrainer`: TRL's GRPOTrainer with rollout trees and per-turn credit
    presets       what a preset means for a trainer with a loss of its own
    rows          trees as rows, one per trajectory, with a mask and an advantage for each token
    trajectories  trees to and from JSON lines, one trajectory a line
    verifiers     trees to and from the message nodes of verifiers' traces

`trl` needs the package of that name (extra `trl`); the others need nothing more. May import: every room up to training.
"""
