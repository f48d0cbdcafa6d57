"""The multicast strategy: regions cut into chunks, and a schedule that keeps the busiest port busy."""
