"""Settings: what there is (`schema`), how it is loaded (`loading`), and Python objects that settings name (`plugins`).

May import: types, errors.
"""
