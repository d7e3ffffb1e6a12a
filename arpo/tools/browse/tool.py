"""The tool `browse`: fetches a URL and returns its readable text.

Guarantees: opens only public web sites, at the very addresses that were checked (`fetch`). Parses each
page in its own process, which is killed if it takes too long (`reader`). The result is always text of bounded length.
A mistake of the model, or a page that does not exist or cannot be read, is a `ToolError`; trouble of a server or the
network is `ToolUnavailable`.
Not covered: scripts, logins, PDF files; text in a page that tries to steer the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
from pathlib import Path

from arpo.errors import ArpoError
from arpo.tools.base import CHARS_PER_TOKEN, Tool, ToolError, ToolTimeout, ToolUnavailable, tool
from arpo.tools.browse.condense import CONDENSE_SECONDS, Condenser
from arpo.tools.browse.fetch import Fetcher, Page, Resolver, system_resolver
from arpo.tools.browse.reader import fit, replace_surrogates, shorten

VERSION = "1"  # of the reader; with another one, cached results are not used
CONCURRENCY = 16
MIN_TOKENS = 16
CONDENSE_CHARS = 40_000  # of a page, sent to a condenser
MAX_QUESTION_CHARS = 1000
READ_SECONDS = 10.0
_READER = Path(__file__).with_name("reader.py")
_INHERITED = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")  # no keys, no passwords


def build_browse(
    *,
    max_tokens: int = 1024,
    timeout: float = 20.0,
    max_bytes: int = 5_000_000,
    allow_private: bool = False,
    condense: Condenser | None = None,
    resolve: Resolver = system_resolver,
) -> Tool:
    """Return the tool `browse`. A page longer than `max_tokens` (of four characters) is condensed, or cut.

    `timeout` is for fetching and parsing together; a condenser gets a minute more.
    """
    if any(importlib.util.find_spec(name) is None for name in ("httpx2", "trafilatura")):
        raise ArpoError("browse needs more packages: pip install httpx2 trafilatura lxml_html_clean")
    if max_tokens < MIN_TOKENS or max_bytes < 1 or not timeout > 0:
        raise ArpoError(f"browse: max_tokens must be at least {MIN_TOKENS}, max_bytes and timeout above 0")
    import httpx2

    fetcher = Fetcher(max_bytes, allow_private, resolve, httpx2.create_ssl_context())
    max_chars = max_tokens * CHARS_PER_TOKEN

    @tool(
        timeout=timeout if condense is None else timeout + CONDENSE_SECONDS,
        max_chars=max_chars,
        concurrency=CONCURRENCY,
        cacheable=True,
        version=VERSION if condense is None else f"{VERSION}, condensed by {condense.version}",
    )
    async def browse(url: str, question: str = "") -> str:
        """Open a web page by its URL and return its text; a question says what to look for in a long page."""
        question = replace_surrogates(question[:MAX_QUESTION_CHARS])
        page = await fetcher.fetch(url)
        title, text = await parse_page(
            page, question, max_chars if condense is None else max(max_chars, CONDENSE_CHARS)
        )
        title = shorten(title, max_chars // 4)
        room = max_chars - len(title) - 2
        if condense is not None and len(text) > room:
            text = fit(await condense.run(text, question), room)
        return f"{title}\n\n{text}" if title else text

    return browse


async def parse_page(page: Page, question: str, max_chars: int) -> tuple[str, str]:
    """Return title and text of a page, parsed in its own process."""
    job = {"html": page.html, "charset": page.charset, "question": question, "max_chars": max_chars}
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-B", str(_READER)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**environment, "PYTHONHASHSEED": "0"},  # the same page gives the same text
        start_new_session=True,  # Ctrl-C is for the parent to handle
        limit=12 * max_chars + 1000,  # a character is at most 12 in JSON
    )
    assert process.stdin is not None and process.stdout is not None
    line = b""
    try:
        async with asyncio.timeout(READ_SECONDS):
            with contextlib.suppress(ConnectionError):  # it may have exited already, see below
                process.stdin.write(json.dumps(job).encode() + b"\n" + page.body)
                await process.stdin.drain()
            process.stdin.close()
            line = await process.stdout.readline()
            await process.wait()
    except TimeoutError:
        raise ToolTimeout(f"reading the page took longer than {READ_SECONDS:g} seconds") from None
    except ValueError:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()  # data left in the pipe would block `wait`
    if process.returncode is not None and process.returncode > 0:
        raise ToolUnavailable("the program that reads pages does not work")
    answer = None
    with contextlib.suppress(ValueError):
        answer = json.loads(line)
    if answer is None:
        raise ToolError("the page is too large or too complex to be read")
    if not answer["text"]:
        raise ToolError("there is no readable text on the page")
    return answer["title"], answer["text"]
