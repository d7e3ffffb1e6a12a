"""The viewer on a folder, for tests with a browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arpo.viewer.folder import Folder
from arpo.viewer.playground import Playground, Worker
from arpo.viewer.server import build_server

Open = Callable[..., Any]


@contextmanager
def serving(folder: Path, start: Callable[[Path], Worker] | None = None) -> Iterator[str]:
    """The viewer on a folder, at a free port; gives its address. `start` makes the workers of its Playground."""
    runs = Folder(folder)
    server = build_server(runs, "127.0.0.1", 0, None if start is None else Playground(runs, start=start))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
