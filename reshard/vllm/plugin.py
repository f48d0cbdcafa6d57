"""The plugin that vLLM calls in each of its processes, by the entry point ``vllm.general_plugins``."""

from __future__ import annotations

#: The name of the backend in vLLM.
BACKEND = "reshard"


def register() -> None:
    """Register the backend for workers and trainers. vLLM imports the classes when it makes one."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory, WeightTransferTrainerFactory

    WeightTransferEngineFactory.register_engine(BACKEND, "reshard.vllm.vllm_worker", "WorkerEngine")
    WeightTransferTrainerFactory.register_engine(BACKEND, "reshard.vllm.vllm_trainer", "TrainerEngine")
