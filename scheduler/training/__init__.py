"""``reshard train``: GPT and U-Transformer, from their sizes to a trained model.

``models`` has the models, and in ``models.presets`` their sizes. ``data`` reads batches, ``plan_search`` finds a
training plan, ``launch`` starts the ranks, ``loop`` trains, and ``report`` says how a run went. ``command`` is the
subcommand of ``reshard``. Importing ``command`` and ``models.presets`` does not import torch.

May import the rest of ``reshard.scheduler``.
"""
