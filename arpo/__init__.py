"""ARPO: reinforcement learning for language-model agents that use tools."""

import os

__version__ = "0.1.0"

# Threads of torch that wait for each other spin for some microseconds, then sleep. By default they spin much longer,
# which made steps tens of times slower on a machine with other work. OpenMP (libgomp) reads this when torch is loaded.
# It changes no number, and a choice of the user's wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
