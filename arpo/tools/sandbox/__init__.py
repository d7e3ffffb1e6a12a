"""Isolation for code that a model wrote. `sandbox` is the interface and the supervisor; `sessions` keeps state.

`zygote` and what it imports (`session_worker`, `streams`, `isolation`, `scratch`, `interpreter`, `linux`, `seccomp`)
run in a bare interpreter: they may import only the standard library and each other, and so may this file.
"""
