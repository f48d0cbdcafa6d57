"""Liveness of ranks: published status, heartbeats, failure detection, membership."""
