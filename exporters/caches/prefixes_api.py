"""`/api/v1/prefixes`: the prefix tree as JSON, level by level for an icicle chart, or whole in columns.

    GET /api/v1/prefixes?depth=3&limit=500&node=ID     nodes at and below one, or from the top
    GET /api/v1/prefixes?by=flow                       those that most tokens flow through, not that most is cached of
    GET /api/v1/prefixes?format=columns                the whole tree, the largest 50,000 nodes of it

Answers carry an ETag that changes with the tree: a page that polls sends it back as If-None-Match and gets 304.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from prefixwatch.exporters.caches.prefixes import NO_EVENTS, NOT_YET, PrefixSource, TreeView
from prefixwatch.kvcache.index.prefix_tree import NO_PARENT, Ints, PrefixTree

SCHEMA = 1
DEFAULT_DEPTH, DEFAULT_LIMIT = 3, 500
MOST_NODES = 5_000
MOST_IN_COLUMNS = 50_000
BY_CACHED, BY_FLOW = "cached", "flow"

NO_BLOCKS = "no block is cached at any worker now"
NO_TRAFFIC = "KV events tell what is cached, not what is hit: scrape a prefixwatch router, whose request records do"


class UnknownNode(LookupError):
    """No node has this id, or none any more."""


def prefixes_document(
    source: PrefixSource,
    *,
    depth: int = DEFAULT_DEPTH,
    limit: int = DEFAULT_LIMIT,
    node: str = "",
    by: str = BY_CACHED,
) -> dict[str, Any]:
    """The `limit` largest nodes at most `depth` levels below `node`, parents first; raises UnknownNode. The largest
    `by` tokens cached, copies counted, or by tokens that flowed through where that is known.

    A node's `children` are all it has, shown or not; what isn't shown is its `cached_tokens_below` without its own and
    its shown children's.
    """
    view = source.view
    if view is None:
        return _nothing(source)
    tree = view.tree
    within = NO_PARENT if not node else _node(source, tree, node)
    flow = flow_tokens_below(view)
    shown = tree.largest(limit, within, depth, by=flow if by == BY_FLOW else None)
    replicas = tree.replicas()
    ids = {k: source.names.id_of(tree, k) for k in shown}
    return _head(source, view) | {
        "node": node or None,
        "depth": depth,
        "limit": limit,
        "nodes": [
            _entry(source, view, k, ids)
            | {"replicas": int(replicas[k])}
            | ({} if flow is None else {"flow_tokens_below": int(flow[k])})
            for k in shown
        ],
    }


def flow_tokens_below(view: TreeView) -> Ints | None:
    """By node, the tokens that requests brought through it and all nodes below it; None where traffic isn't known."""
    if view.traffic is None:
        return None
    return view.tree.with_all_below(view.traffic.requests * view.tree.length_tokens)


def columns_document(source: PrefixSource) -> dict[str, Any]:
    """All nodes, or the largest; `parent` is a position in the columns, -1 at the top."""
    view = source.view
    if view is None:
        return _nothing(source)
    tree = view.tree
    shown = tree.largest(MOST_IN_COLUMNS)
    place = {node: position for position, node in enumerate(shown)}
    place[NO_PARENT] = NO_PARENT
    return _head(source, view) | {
        "left_out_nodes": len(tree) - len(shown),
        "columns": {
            "id": [source.names.id_of(tree, node) for node in shown],
            "parent": [place[parent] for parent in tree.parent[shown].tolist()],
            "tokens": tree.tokens[shown].tolist(),
            "copied_tokens": tree.copied_tokens[shown].tolist(),
            "cached_tokens_below": tree.tokens_below[shown].tolist(),
            "replicas": tree.replicas()[shown].tolist(),
            **_traffic_columns(view, shown),
        },
        "names": {str(place[node]): name for node, name in view.configured.items() if node in place},
    }


def _traffic_columns(view: TreeView, shown: list[int]) -> dict[str, list[int]]:
    if view.traffic is None:
        return {}
    return {
        "requests": view.traffic.requests[shown].tolist(),
        "reused_requests": view.traffic.reused[shown].tolist(),
    }


def prefixes_handler(source: PrefixSource) -> Any:
    """The page of these documents."""

    async def prefixes(request: web.Request) -> web.Response:
        try:
            asked = _asked(request.query)
        except ValueError as error:
            return _json({"error": str(error)}, status=400)
        etag = f'"{source.etag}"'
        if etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers={"ETag": etag})
        try:
            if asked.pop("format") == "columns":
                document = await asyncio.to_thread(columns_document, source)
            else:
                document = await asyncio.to_thread(prefixes_document, source, **asked)
        except UnknownNode as error:
            return _json({"error": str(error)}, status=404)
        return _json(document, headers={"ETag": etag})

    return prefixes


def _asked(query: Mapping[str, str]) -> dict[str, Any]:
    unknown = sorted(set(query) - {"depth", "limit", "node", "format", "by"})
    if unknown:
        raise ValueError(f"unknown parameter {unknown[0]}: there are depth, limit, node, by and format")
    how = query.get("format", "nodes")
    if how not in ("nodes", "columns"):
        raise ValueError(f"format must be nodes or columns, not {how[:40]}")
    depth, limit = query.get("depth", str(DEFAULT_DEPTH)), query.get("limit", str(DEFAULT_LIMIT))
    if not (depth.isascii() and depth.isdigit() and len(depth) < 6):
        raise ValueError("depth must be a whole number of levels, such as 3")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:6]) <= MOST_NODES and len(limit) < 6):
        raise ValueError(f"limit must be a number of nodes from 1 to {MOST_NODES}")
    by = query.get("by", BY_CACHED)
    if by not in (BY_CACHED, BY_FLOW):
        raise ValueError(f"by must be {BY_CACHED} or {BY_FLOW}, not {by[:40]}")
    return {"format": how, "depth": int(depth), "limit": int(limit), "node": query.get("node", ""), "by": by}


def _json(document: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(document)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _nothing(source: PrefixSource) -> dict[str, Any]:
    why = NOT_YET if source.table.workers else NO_EVENTS
    return {"schema": SCHEMA, "version": None, "nodes": [], "absent": {"nodes": why}}


def _head(source: PrefixSource, view: TreeView) -> dict[str, Any]:
    tree = view.tree
    return {
        "schema": SCHEMA,
        "version": f"{source.started}-{tree.version}",
        "changed_unix_seconds": view.changed_unix_seconds,
        "workers": list(tree.workers),
        "totals": {
            "nodes": len(tree),
            "blocks": len(tree.replicas_of_block),
            "tokens": int(tree.tokens.sum()),
            "copied_tokens": int(tree.copied_tokens.sum()),
            "height_levels": tree.height,
        },
        **_traffic(source, view),
    }


def _traffic(source: PrefixSource, view: TreeView) -> dict[str, Any]:
    """`unplaced_requests` ended at blocks that aren't in the tree (any more)."""
    absent = {"nodes": NO_BLOCKS if source.table.workers else NO_EVENTS} if not len(view.tree) else {}
    if view.traffic is None:
        return {"absent": absent | dict.fromkeys(("requests", "flow_tokens", "hit_share"), NO_TRAFFIC)}
    return {"unplaced_requests": view.traffic.unplaced, "absent": absent}


def _entry(source: PrefixSource, view: TreeView, node: int, ids: Mapping[int, str]) -> dict[str, Any]:
    tree = view.tree
    parent = int(tree.parent[node])
    of_parent = None if parent == NO_PARENT else ids.get(parent) or source.names.id_of(tree, parent)
    return {
        "id": ids[node],
        "name": view.configured.get(node) or f"p-{ids[node][:8]}",
        "named": node in view.configured,
        "parent": of_parent,
        "level": int(tree.level[node]),
        "children": int(tree.children[node]),
        "start_tokens": int(tree.start_tokens[node]),
        "blocks": int(tree.blocks[node]),
        "tokens": int(tree.tokens[node]),
        "cached_tokens_below": int(tree.tokens_below[node]),
        "copied_tokens_below": int(tree.copied_tokens_below[node]),
        "workers": dict(tree.workers_of(node)),
        **_flow(view, node),
    }


def _flow(view: TreeView, node: int) -> dict[str, Any]:
    """Requests of the last 5 to 10 minutes whose prompts ran through the node, the tokens that makes, and the share of
    these requests that found the node (or its beginning) cached; without any there is no share."""
    if view.traffic is None:
        return {}
    requests, reused = int(view.traffic.requests[node]), int(view.traffic.reused[node])
    flow = {"requests": requests, "flow_tokens": requests * int(view.tree.length_tokens[node])}
    return flow | ({"hit_share": reused / requests} if requests else {})


def _node(source: PrefixSource, tree: PrefixTree, wanted: str) -> int:
    for node in range(len(tree)):
        if source.names.id_of(tree, node) == wanted:
            return node
    raise UnknownNode(f"no prefix has the id {wanted[:32]} now: it was evicted, or split by a new branch")
