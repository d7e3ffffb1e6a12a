"""The command line: one module per group of commands, and everything that prints.

`main` is the entry point, `display` the console. May import: every room.
"""
