from .publisher import Publisher as Publisher, PublishHandle as PublishHandle, PublishReport as PublishReport
from .rules import (
    Concatenate as Concatenate,
    Drop as Drop,
    Pad as Pad,
    Rename as Rename,
    Split as Split,
    Stack as Stack,
    Transpose as Transpose,
    Trim as Trim,
    Unstack as Unstack,
)
from .state_dict import transfer_state_dict as transfer_state_dict
from .subscriber import Subscriber as Subscriber
