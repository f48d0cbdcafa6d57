"""Emulate several hosts on one Linux machine: namespaces connected by rate-limited links."""
