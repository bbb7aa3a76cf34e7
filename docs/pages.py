"""Pages that `make docs` adds to these: a start page, the changelog, the API reference.

A hook of mkdocs. The start page is README.md, the others are CONTRIBUTING.md and CHANGELOG.md. The
reference has every public name, from its docstring. Links to files outside of the site become text.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
MODULES = {
    "cudnngraph": "Graphs, executables, models",
    "cudnngraph.nn": "Modules",
    "cudnngraph.functional": "Functions on tensors",
}
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):<code>~?(?:cudnngraph\.)?")


def api() -> str:
    """The page of the reference, for mkdocstrings to fill."""
    lines = ["# API reference", "", "Every public name, from its docstring."]
    for name, title in MODULES.items():
        module = importlib.import_module(name)
        lines += ["", f"## {title}", ""]
        for public in sorted(module.__all__, key=str.lower):
            kind = type(getattr(module, public)).__name__
            home = getattr(getattr(module, public), "__module__", "")
            if kind != "module" and (name == "cudnngraph" or home.startswith("cudnngraph")):
                lines += [f"::: {name}.{public}", ""]
    return "\n".join(lines)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in this folder."""
    for source, page in COPIED.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, place in COPIED.items():
            text = text.replace(f"]({other})", f"]({place})")
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "api.md", content=api()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links that lead out of the site into text."""
    there = {file.src_uri for file in files}

    def shown(link: re.Match[str]) -> str:
        text, target = link[1], link[2].partition("#")[0]
        place = (Path(page.file.src_uri).parent / target).as_posix()
        place = re.sub(r"[^/]+/\.\./", "", place)
        return link[0] if not target or "://" in target or place in there else text

    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show the roles of docstrings (``:class:`Graph```) as code alone."""
    return _ROLE.sub("<code>", html)
