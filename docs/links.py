"""A hook of the site: links that leave docs/ lead to files that the site does not have; they become these files' names."""

import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#]*)(?:#[^)]*)?\)")


def named(link: re.Match[str]) -> str:
    text, path = link.groups()
    if path == "README.md":
        return f"[{text}](index.md)"
    return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return LINK.sub(named, markdown)
