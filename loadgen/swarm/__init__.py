"""Locust alone: users in several processes, and its web page."""
