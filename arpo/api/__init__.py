"""The Python API: `import arpo` exports what is here. It trains and asks agents with Python objects in place of names.

    settings   from the arguments of a call to settings, and the objects that these name
    thread     an event loop in a thread of its own, so that all this works in scripts, notebooks and threads
    progress   what a caller sees of a job: log lines and callbacks
    tree       a rollout tree as text and as a picture
    agent      `Agent`: asks, samples and evaluates; `load_agent`, `rollout`, `evaluate`
    trainer    `Trainer`: an agent that is trained
May import everything up to cluster.
"""
