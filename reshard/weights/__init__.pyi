from .mapping.families import megatron as megatron, original_llama as original_llama
from .mapping.rules import (
    Concatenate as Concatenate,
    Drop as Drop,
    GroupHeads as GroupHeads,
    Pad as Pad,
    Rename as Rename,
    Rope as Rope,
    Split as Split,
    Stack as Stack,
    Transpose as Transpose,
    Trim as Trim,
    UngroupHeads as UngroupHeads,
    Unstack as Unstack,
    inverted as inverted,
)
from .model.quantize import Quantize as Quantize
from .param_meta import param_metas as param_metas
from .publisher import Publisher as Publisher, PublishHandle as PublishHandle, PublishReport as PublishReport
from .recorded_loader import record as record
from .state_dict import transfer_state_dict as transfer_state_dict
from .subscriber import Subscriber as Subscriber
