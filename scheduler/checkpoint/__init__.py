"""Checkpoints of safetensors and JSON files, under the names of the whole model.

A checkpoint of step 100 is the folder ``step-00000100``. All ranks need access to the same file system. Keys:

- ``model.NAME``: parameters and buffers.
- ``optimizer.state.NAME.KEY`` and ``optimizer.param_groups.NAME.KEY``: as in torch's flattened optimizer state.
- ``feedback.RANK.NAME``: the error feedback of compressed gradient sums, on one rank.
- ``rng.RANK`` and ``loader.RANK``: random generators, and the state of the loader, on one rank.
- ``engine`` and ``lr_scheduler``: counters of the engine, and the state of the scheduler.

Files:

- ``rank-00003-000.safetensors``: tensors and shards that rank 3 wrote. ``torch.distributed.checkpoint`` can load them
  with its ``HuggingFaceStorageReader``.
- ``rank-00003.json``: values that rank 3 wrote.
- ``index.json``: for each tensor its dtype, its shape and its shards, with the place and the digest of their bytes; for
  each value its file.
- ``SHA256SUMS``: the digests of the other files.

A checkpoint is written to ``step-00000100.unfinished``, which is then renamed. If a rank dies while it saves step 100
again, the earlier checkpoint of step 100 is still there. :mod:`.pickled` reads the format of earlier versions.

May import ``runtime`` and the packages below it.
"""

from .checkpoint_choice import choose_checkpoint, find_model_shapes
from .folders import find_checkpoints
from .loading import check_model_entries, find_entries, find_model_entries, load
from .saving import CHECKPOINT_TIMEOUT_SECONDS, check_saved, save
from .training_state import TrainingState, check_objects

__all__ = [
    "CHECKPOINT_TIMEOUT_SECONDS",
    "TrainingState",
    "check_model_entries",
    "check_objects",
    "check_saved",
    "choose_checkpoint",
    "find_checkpoints",
    "find_entries",
    "find_model_entries",
    "find_model_shapes",
    "load",
    "save",
]
