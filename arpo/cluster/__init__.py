"""Training on a Ray cluster: trees are sampled by workers on its machines, and trained on where the run was started.

`ray_backend.connect` leads from the settings to a sampler for `arpo.training`. `scheduler` decides, `sampler` carries
out, `worker` runs in the other processes, and only `ray_backend` knows Ray. May import training and the rooms below it.
"""
