"""ARPO: reinforcement learning for language-model agents that use tools."""

import os

__version__ = "0.1.0"

# Threads of torch that wait for each other sleep instead of spinning: on a machine with other work, spinning made steps
# tens of times slower. OpenMP reads this when torch is loaded. It changes no number, and a value of the user's wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
