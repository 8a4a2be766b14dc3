"""A hook of the site: links that leave docs/ lead to files that the site does not have; they become these files' names."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]]*)\]\((\.\./[^)#]*)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def named(link: re.Match[str]) -> str:
        text, path = link[1], posixpath.normpath(posixpath.join(folder, link[2]))
        if not path.startswith("../"):
            return link[0]
        if path == "../README.md":
            return f"[{text}](index.md)"
        path = path.removeprefix("../")
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return LINK.sub(named, markdown)
