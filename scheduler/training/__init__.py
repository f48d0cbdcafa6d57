"""``reshard train``: GPT and U-Transformer, from their sizes to a trained model.

``models`` has the models, and in ``models.model_presets`` their sizes. ``data`` reads batches, ``plan_search`` finds a
training plan, ``launch`` starts the ranks, ``loop`` trains, and ``training_report`` says how a run went.
``train_command`` is the subcommand of ``reshard``. It and ``models.model_presets`` import no torch.

May import the rest of ``reshard.scheduler``.
"""
