"""The endpoints that take prompts: those that are read, and those that are passed through to an engine as they come."""

from __future__ import annotations

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

READ = {CHAT: "chat", COMPLETIONS: "text_completion"}
"""Prompts that are tokenised; the value is OpenTelemetry's name of the operation."""
GENERATING = {"/v1/messages": "chat", "/v1/responses": "chat", "/generate": "text_completion"}
"""Prompts that engines cache and that are not read: routed without a known prefix, with the tenant's salt. Of their
answers only the token counts are read."""
HELPING = {
    "/v1/messages/count_tokens": "count_tokens",
    "/v1/embeddings": "embeddings",
    "/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
"""Everything else that engines serve by POST: counted by itself, not among the requests for answers."""
OPERATIONS = {**READ, **GENERATING, **HELPING}
