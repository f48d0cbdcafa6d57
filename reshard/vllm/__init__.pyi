from .trainer import TrainerEngine as TrainerEngine, TrainerInitInfo as TrainerInitInfo
