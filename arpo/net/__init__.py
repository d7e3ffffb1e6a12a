"""HTTP: a bounded client with retries, chat completions over it, and API keys from the environment.

Imports only `arpo.types`, `arpo.errors` and `arpo.config`.
"""
