"""The signal study: how much of each algorithm's gradient is signal, on a frozen model, before any training.

`runner` samples trees and computes gradients (`gradients`), `estimates` turns their inner products into signal-to-noise
ratios and cosines, `branch_points` asks what predicts a useful branch point, `report` writes and draws the results.
"""
