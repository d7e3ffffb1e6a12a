"""The built-in plug-in: a generated toy world, labyrinths and scenes, the small models made for them, and the demos.

May import every room except cli. Only cli imports it; all others load `arpo.builtin.plugin` by its name.
"""
