"""Training over pipeline stages on emulated hosts, every schedule side by side."""
