from reshard.vllm.trainer import TrainerInitInfo as TrainerInitInfo
