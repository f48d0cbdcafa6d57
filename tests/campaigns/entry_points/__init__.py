"""Valid calls of public functions, by the kind of their arguments: ``{name: (function, valid arguments)}``."""
