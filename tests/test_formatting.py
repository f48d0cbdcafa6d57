"""Numbers in texts for people."""

from __future__ import annotations

from reshard.formatting import format_bytes, format_seconds


def test_bytes_are_formatted_in_binary_units():
    expected = {0: "0 bytes", 1023: "1023 bytes", 1024: "1 KiB", 1536: "1.5 KiB", 2**20: "1 MiB", 3 * 2**29: "1.5 GiB"}
    assert {nbytes: format_bytes(nbytes) for nbytes in expected} == expected


def test_seconds_become_minutes_and_hours():
    expected = {0: "0 s", 5e-6: "5 us", 0.25: "250 ms", 119: "119 s", 120: "2 min", 1310: "21.8 min", 7200: "2 h"}
    assert {seconds: format_seconds(seconds) for seconds in expected} == expected
