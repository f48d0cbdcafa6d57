"""Models as whole modules, which ``Pipe`` cuts into stages at their layers, and their presets, which need no torch."""
