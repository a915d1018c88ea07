"""The embedded reference router: an OpenAI-compatible proxy with one file per routing policy."""
