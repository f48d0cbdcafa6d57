"""``reshard train``: GPT and U-Transformer, from their sizes to a trained model.

``presets`` names the sizes. ``models`` builds the models, ``data`` reads batches, ``loop`` trains, and ``command`` is
the subcommand of ``reshard``. Importing ``command`` and ``presets`` does not import torch.

May import the rest of ``reshard.scheduler``.
"""
