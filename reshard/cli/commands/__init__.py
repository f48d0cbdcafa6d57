"""One module for each command of this package; imports the rest of ``reshard.cli``, which does not import it.

A module has ``HELP``, ``EXAMPLES``, ``add_arguments(parser)`` and ``run(options) -> exit status``. It is registered as
an entry point of the group ``reshard.commands`` in ``pyproject.toml``, as are the commands of other packages. What
takes long to import, such as torch, is imported in ``run``.
"""
