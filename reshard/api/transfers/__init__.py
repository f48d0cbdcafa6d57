"""Transfers of agreed plans: their connections, threads and streams, their handles, and recovery."""
