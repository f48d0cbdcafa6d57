"""Which ranks are alive and in sync: status in the store, heartbeats, failure detection, membership."""
