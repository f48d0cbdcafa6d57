from .vllm_trainer import TrainerEngine as TrainerEngine, TrainerInitInfo as TrainerInitInfo
