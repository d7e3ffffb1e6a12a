"""Isolation for code that a model wrote. `sandbox` is the interface and the supervisor.

`zygote` and what it imports (`isolation`, `scratch`, `interpreter`, `linux`, `seccomp`) run in a bare interpreter: they
may import only the standard library and each other, and so may this file.
"""
