"""Tools that a model can call, and the executor that calls them safely.

`base`, `schema`, `executor` and `cache` serve every tool; `python` runs code in `sandbox`; `search`,
`browse` and `mcp` are further tools. Imports only `arpo.types`, `arpo.errors`, `arpo.config`, `arpo.net` and
`arpo.data`.
"""
