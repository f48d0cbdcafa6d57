"""The page of a plan: ``reshard plan --format html``. May import the modules of ``reshard.cli``, but no command."""
