"""`python -m arpo` is `arpo`; it is what `torchrun -m arpo train ...` starts."""

from __future__ import annotations

from arpo.cli.main import main

main()
