"""The tool `browse`: public web pages as text."""
