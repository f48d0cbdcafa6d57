"""Transfers between real processes."""
