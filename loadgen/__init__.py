"""Shared-prefix load: scenarios, exact prompts, open-loop arrivals, and the log, grades and report they end in."""
