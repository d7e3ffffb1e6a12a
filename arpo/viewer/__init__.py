"""The viewer: a local page that shows runs, asks their agents, and can be exported as one HTML file.

May import: types, errors, config, net, figures, runs and, inside functions, studies. `worker`, a process of its own,
imports all that an agent needs; everything else loads without torch.
"""
