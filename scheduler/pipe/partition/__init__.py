"""Cut a whole model into stages, find what they exchange, and give them their values."""
