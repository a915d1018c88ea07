"""Reuse across tenants, judged from request records."""
