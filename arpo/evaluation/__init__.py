"""Evaluation: held-out accuracy, benchmarks with saved answers, models behind endpoints, statistics and reports.

May import: every room up to trainer.
"""
