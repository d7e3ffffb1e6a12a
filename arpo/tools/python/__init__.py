"""The tool `python`: code in the sandbox."""
