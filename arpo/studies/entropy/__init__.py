"""The entropy study behind ARPO: where a model is uncertain, and what branching there gains.

`study` computes it from scored trees, `report` writes and draws it, `runner` gets the trees from a run or a model.
"""
