"""Which ranks are alive and in sync: published status, heartbeats, failure detection, membership."""
