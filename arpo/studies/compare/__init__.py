"""Compare algorithms over several seeds with equal budgets: `runner` trains, `stats` computes, `report` writes.

`trial` is the process of one training run. `figures` draws the results with matplotlib.
"""
