"""Checkpoints of safetensors and JSON files, under the names of the whole model.

A checkpoint of step 100 is the folder ``step-00000100``. Its keys are ``model.NAME``, ``optimizer.state.NAME.KEY`` and
``optimizer.param_groups.NAME.KEY``, as in torch's flattened optimizer state. The keys ``engine``, ``lr_scheduler``,
``rng.RANK`` and ``loader.RANK`` hold other state. All ranks need access to the same file system. Files:

- ``rank-00003-000.safetensors``: tensors and shards that rank 3 wrote. ``torch.distributed.checkpoint`` can load them
  with its ``HuggingFaceStorageReader``.
- ``rank-00003.json``: values that rank 3 wrote.
- ``index.json``: for each tensor its dtype, its shape and its shards, with the place and the digest of their bytes; for
  each value its file.
- ``SHA256SUMS``: the digests of the other files.

A checkpoint is written to ``step-00000100.unfinished``, which is then renamed. If a rank dies while it saves step 100
again, the earlier checkpoint of step 100 is still there. :mod:`.pickled` reads the format of earlier versions.
"""

from .choosing import choose_checkpoint
from .folders import find_checkpoints
from .loading import check_model_entries, find_entries, find_model_entries, load
from .saving import CHECKPOINT_TIMEOUT_SECONDS, check_saved, save
from .state import TrainingState, check_objects

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
    "load",
    "save",
]
