"""The built-in plug-in: a generated toy world, labyrinths, a small model cold-started for either, and the demo.

May import every room except cli. Only cli imports it; all others load `arpo.builtin.plugin` by its name.
"""
