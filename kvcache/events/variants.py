"""Fields of KV events that some engines, or some of their modes, write in a way of their own."""

from __future__ import annotations

from typing import Any

_BLOCK_NAMES = frozenset({"block_hashes", "parent_block_hash"})


def usual(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of an event as most engines write them; values of a wrong type stay as they are.

    Names of blocks that are texts become bytes. SGLang's arrays may have a map of metadata, or the extra keys, where
    vLLM's have the adapter's name (sgl-project/sglang#38562, #27735).

    With EAGLE-like speculation SGLang caches pairs of neighbouring tokens and lists them (ai-dynamo/dynamo#6872). A
    block then is as long as ever and begins with the first of each pair; to match it the token after it must be the
    same as well, so that a prompt which ends or differs there is credited with at most one block too many.
    """
    fields = {name: _as_bytes(value) if name in _BLOCK_NAMES else value for name, value in fields.items()}
    tokens, named = fields.get("token_ids"), fields.get("lora_name")
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):
        fields["token_ids"] = [pair[0] if isinstance(pair, list) and pair else pair for pair in tokens]
    if isinstance(named, dict | list):
        fields |= {"lora_name": None, "metadata" if isinstance(named, dict) else "extra_keys": named}
    return fields


def _as_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_bytes(one) for one in value]
    return value.encode("utf-8", "replace") if isinstance(value, str) else value
