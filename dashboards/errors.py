"""What goes wrong outside of the definitions."""


class DashboardError(Exception):
    """A Prometheus can't be asked; the message names the address and the remedy."""
