"""The multicast strategy: cut regions into chunks and schedule them so that the busiest port is never idle."""
