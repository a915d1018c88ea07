"""What goes wrong while evidence is gathered."""

from __future__ import annotations


class EvidenceError(Exception):
    """Nobody can be asked; the message names the address and the remedy."""
