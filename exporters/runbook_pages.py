"""The runbooks as pages of the exporter, so that an alert's link leads somewhere on every installation."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib import resources

from aiohttp import web
from markdown_it import MarkdownIt

from prefixwatch.exporters.live.page import POLICY, asset_url

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_FRONT_MATTER = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_FILE_LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)")
"""To a file of the repository, which the exporter doesn't serve."""
_FOLDER = resources.files("prefixwatch.runbooks")
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="stylesheet" href="{style}">
</head>
<body>
<main><section class="document">
{body}
</section></main>
</body>
</html>
"""


def routes() -> list[web.RouteDef]:
    """`/runbooks/` lists them, `/runbooks/NAME` is one; `NAME.md`, as they link to each other, as well."""
    return [web.get("/runbooks/", _index), web.get("/runbooks/{name}", _runbook)]


def names() -> list[str]:
    """Of all runbooks."""
    found = (path.name.removesuffix(".md") for path in _FOLDER.iterdir() if path.name.endswith(".md"))
    return sorted(name for name in found if _NAME.fullmatch(name))


async def _index(_: web.Request) -> web.Response:
    items = "\n".join(f'<li><a href="/runbooks/{name}">{name}</a></li>' for name in names())
    return _page("Runbooks", f"<h1>Runbooks</h1>\n<ul>\n{items}\n</ul>")


async def _runbook(request: web.Request) -> web.Response:
    name = request.match_info["name"].removesuffix(".md")
    if name not in names():
        raise web.HTTPNotFound(text=f"no runbook is called {name[:100]}; /runbooks/ lists them\n")
    return _page(name, _rendered(name))


@cache
def _rendered(name: str) -> str:
    """The runbook's HTML, without what is only for programs. HTML within the text is shown, not used; files of the
    repository are named."""
    text = _FOLDER.joinpath(f"{name}.md").read_text(encoding="utf-8")
    text = _FILE_LINK.sub(r"\1 (\2)", _COMMENT.sub("", _FRONT_MATTER.sub("", text)))
    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _page(title: str, body: str) -> web.Response:
    text = _PAGE.format(title=escape(title), style=asset_url("live.css"), body=body)
    return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": POLICY})
