"""The answers of OpenAI-compatible servers, as every part of prefixwatch reads them."""
