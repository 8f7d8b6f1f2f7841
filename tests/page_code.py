"""The code of a documentation page, for tests that run it: a page whose example no longer works fails its test."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def code_under(page: str, heading: str) -> str:
    """The first Python block below a heading of the second level.

    Raises:
        ValueError: the page has no such heading, or no block below it.
    """
    parts = re.split(r"^## (.+)\n", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    found = re.search(r"^```python\n(.*?)^```", sections.get(heading, ""), flags=re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page} has no Python block under '## {heading}'; it has {sorted(sections)}")
    return found[1]


def statements(code: str) -> list[str]:
    """Its lines, without imports, comments and blanks."""
    lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line for line in lines if not line.startswith(("import ", "from "))]
