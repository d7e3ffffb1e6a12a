"""Documentation that could go stale: the table of settings is the one in the code, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from arpo.config.loading import settings_table

ROOT = Path(__file__).parent.parent
SETTINGS = ROOT / "docs" / "settings.md"


def settings_page() -> str:
    """What docs/settings.md must hold; `python tests/test_docs.py` writes it."""
    rows = [
        f"| `{key}` | {_plain(kind)} | `{default}` | {_plain(description)} |"
        for key, kind, default, description in settings_table()
    ]
    head = [
        "# Settings",
        "",
        "Made by `.venv/bin/python tests/test_docs.py`; do not edit by hand.",
        "",
        "Set them in a TOML file, as `num_trajectories = 8` under `[rollout]`, or on the command line,",
        "as `rollout.num_trajectories=8`.",
        "Later ones win: defaults, preset, file, command line.",
        "",
        "| setting | type | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([<|*])", r"\\\1", text)


def test_the_settings_page_is_up_to_date() -> None:
    assert SETTINGS.read_text(encoding="utf-8") == settings_page(), "run: .venv/bin/python tests/test_docs.py"


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name} links to {target}"


if __name__ == "__main__":
    SETTINGS.write_text(settings_page(), encoding="utf-8")
