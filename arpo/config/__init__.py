"""Settings: what there is (`schema`, `algorithm`), how it is loaded (`loading`), and objects they name (`plugins`).

May import: types, errors.
"""
