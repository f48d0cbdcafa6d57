"""Runs cases, times them and reports what was measured."""
