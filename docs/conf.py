"""The documentation as a site: `make docs`. The pages are plain Markdown, so that they can be read without it.

Nothing is fetched, neither when the site is built nor when it is read: fonts are the reader's own, and search works
from files. Formulas are text.
"""

from sphinx.application import Sphinx

import arpo

project = "arpo"
author = "the ARPO project contributors"
release = arpo.__version__
html_title = f"arpo {release}"
html_theme = "furo"
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_show_search_summary = False  # it would fetch the pages, which a browser refuses for files
html_static_path = ["static"]
html_css_files = ["wide.css"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to headings, as on GitHub
myst_links_external_new_tab = False
highlight_language = "none"
root_doc = "docs/index"  # the sources begin at the repository's root, so that links from docs/ to its pages work
include_patterns = ["docs/**.md", "CONTRIBUTING.md", "CHANGELOG.md"]
html_extra_path = ["static/front"]

NAVIGATION = {
    "Start here": ("install", "own-task"),
    "Your task": ("data", "tools", "environments", "rewards", "formats", "coldstart", "programs"),
    "Algorithms": ("method", "algorithms", "world", "labyrinth", "scenes"),
    "Train and look": ("training", "evaluation", "viewer", "trackers", "serve", "trl"),
    "Results": ("RESULTS", "compare", "signal", "entropy", "results/earlier", "journal/LOG"),
    "Speed and scale": ("engine", "vllm", "vision", "sharded", "cluster", "scaling"),
    "Reference": ("api", "cli", "settings"),
    "Inside": ("architecture", "trust", "../CONTRIBUTING", "releasing", "../CHANGELOG"),
}


def add_navigation(_: Sphinx, name: str, source: list[str]) -> None:
    """Append the table of contents to the start page, where it is hidden but for the sidebar."""
    if name == "docs/index":
        for caption, pages in NAVIGATION.items():
            source[0] += "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_navigation)
