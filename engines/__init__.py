"""Engines to serve a model with: a simulated one (a pure model behind an HTTP face) and real vLLM on CPU."""
