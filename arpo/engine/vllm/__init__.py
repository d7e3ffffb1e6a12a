"""Engines over vLLM: in a process that arpo starts (`engine`), or on servers that run already (`servers`)."""
