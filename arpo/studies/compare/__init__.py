"""Compare algorithms over several seeds with equal budgets: `runner` trains, `stats` computes, `report` writes.

`results` is what was measured, as data and as JSON. `tuning` has the grid of settings that algorithms are tuned over.
`trial` is the process of one training run. `figures` draws the results with matplotlib.
"""
