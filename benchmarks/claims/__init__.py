"""Published claims about prefix-aware routing, tried on the simulated fleet: `python -m benchmarks.claims`."""
