"""Types of the native module; see native/."""

from typing import Any

def copy_runs(src: Any, dst: Any, src_offsets: Any, dst_offsets: Any, length: Any) -> None:
    """Copy ``length[i]`` bytes from ``src[src_offsets[i]]`` to ``dst[dst_offsets[i]]`` for every ``i``."""

def encode_blocks(
    kind: int, format: int, columns: int, values: int, source: Any, out: Any, measure: bool
) -> tuple[float, float]:
    """Encode rows of values; return the sums of squared errors and of squares if measured, else zeros."""

def decode_blocks(kind: int, format: int, columns: int, values: int, data: Any, target: Any, accumulate: bool) -> None:
    """Decode into rows of values, or add to them."""

def sample_changes(width: int, words: Any, base: Any, every: int) -> tuple[int, int, int, int]:
    """Words in one of so many blocks of 64 bytes: all, changed, changed by a signed byte; and the sum of low bytes."""

def encode_delta(width: int, words: Any, base: Any, out: Any) -> int:
    """Write the changes from base to words; return their size, or -1 if they do not fit."""

def apply_delta(width: int, data: Any, words: Any) -> bool:
    """Apply changes in place; return whether they are well formed."""

def encode_bitmap(width: int, words: Any, base: Any, out: Any) -> int:
    """Write a bitmap of the changes and a byte for each; return their size, or -1 if they do not fit."""

def apply_bitmap(width: int, data: Any, words: Any) -> bool:
    """Apply what encode_bitmap wrote in place; return whether it is well formed."""

def encode_exponents(words: Any, out: Any) -> int:
    """Encode bf16 values without loss; return the size of their code, or -1 if it does not fit."""

def decode_exponents(data: Any, words: Any) -> bool:
    """Decode into bf16 values; return whether the data decodes to exactly that many values."""

def flow(
    queue: Any,
    stream: Any,
    receiver: Any,
    window: Any,
    ahead: Any,
    nbytes: Any,
    after_offsets: Any,
    after: Any,
    port_offsets: Any,
    port: Any,
    overhead_port: Any,
    overhead_bytes: Any,
    buffer: Any,
    rate: Any,
    burst: Any,
    start: Any,
    finish: Any,
    cutoff: float = ...,
    most_operations: int = ...,
) -> int:
    """Write the start and finish time of every message, and return 0; see ``reshard.cost.fluid.Network``.

    1 if the last message would finish after the cutoff, 2 if the simulation takes more operations.
    """

def flow_serially(
    sender: Any,
    receiver: Any,
    nbytes: Any,
    window: Any,
    after_offsets: Any,
    after: Any,
    delay: Any,
    host_of: Any,
    ports: Any,
    rate: Any,
    ahead: Any,
    latency_across: float,
    latency_inside: float,
) -> float:
    """The end of the last message in seconds if ports pass one message at a time; see ``reshard.cost.serial_ports``."""

def rotate(
    receivers: Any,
    holder: Any,
    nbytes: Any,
    piece_offsets: Any,
    host_of: Any,
    nic_of: Any,
    num_nics: int,
    rotates: bool,
    most_bytes: float,
    window_across: int,
    window_inside: int,
    region: Any,
    sender: Any,
    receiver: Any,
    window: Any,
    after_offsets: Any,
    after: Any,
    source: Any,
) -> int:
    """Write the messages of ``reshard.planner.multicast.rotation``; return the number of entries of ``after``.

    It is -1, and nothing is written, if ports would be busy for more than ``most_bytes``.
    """

def number_rows(rows: Any, first: Any, number: Any) -> int:
    """Number equal rows in the order of their first ones; return the count of numbers."""

def add_direct_loads(
    holder: Any, receivers: Any, nbytes: Any, host_of: Any, nic_of: Any, sent: Any, received: Any, pairs: Any
) -> None:
    """Add the bytes that ports send and receive if each region goes directly to its receivers on other hosts."""

def pick_senders(
    holder_offsets: Any, holders: Any, task: Any, receiver: Any, nbytes: Any, host_of: Any, sender: Any
) -> None:
    """Write the sender of every message; see ``reshard.planner.strategies.sender_selection``."""

def grow_trees(
    sender: Any,
    receiver_offsets: Any,
    receivers: Any,
    nbytes: Any,
    host_of: Any,
    pod_of: Any,
    num_pods: int,
    most_arriving: Any,
    from_: Any,
    to: Any,
) -> None:
    """Write the edges of broadcast trees, tree after tree; see ``reshard.planner.strategies.trees``."""

def order_greedily(
    way_offsets: Any,
    home: Any,
    crosses: Any,
    port_offsets: Any,
    port: Any,
    task_offsets: Any,
    nbytes: Any,
    num_hosts: int,
    num_ports: int,
    tries: int,
    at_once: int,
    state: Any,
    classes: Any,
    ways: Any,
) -> None:
    """Write each task's class and send option into ``classes`` and ``ways``; see ``planner/strategies/greedy.py``."""

def make_schedule(nics: Any, workload: Any) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """Return piece, sender, receiver, source, after_offsets, after and staged (uint8) of all messages, in order.

    ``nics`` and ``workload`` have the fields of ``Nics`` and ``ChunkWorkload`` in ``planner/multicast``.
    """

def best_stages(
    num_layers: int,
    is_chain: bool,
    option_class: Any,
    forward: Any,
    backward: Any,
    activation: Any,
    fixed: Any,
    sync: Any,
    ending: Any,
    allowed: Any,
    next_at: Any,
    port_in: Any,
    port_out: Any,
    memory: Any,
    received: Any,
    sent: Any,
    cut_bytes: Any,
    factor: Any,
    latency: Any,
    priced_at: Any,
    priced_forward: Any,
    priced_backward: Any,
    microbatches: int,
    bottleneck_seconds: float,
) -> tuple[float, float, list[tuple[int, int, int, int]]]:
    """Return the best stages for one bottleneck time.

    See ``reshard.scheduler.autoparallel.methods.recurrence_tables``.
    """

def create_memory(name: str) -> int:
    """Create an unnamed file in memory; return its descriptor. Linux only, as the next five."""

def seal_memory(descriptor: int, grows: bool, writes: bool) -> None:
    """Let no process cut a file any more, nor, unless ``grows`` and ``writes``, extend and write it."""

def map_shared(descriptor: int, offset: int, nbytes: int, writes: bool = ...) -> Any:
    """Map a part of a sealed file as bytes. Without ``writes``, the array must not be written.

    OSError if the file has fewer bytes, or is not sealed.
    """

def add_to_counter(words: Any, index: int, added: int) -> int:
    """Add to a counter; return its new value."""

def publish_number(words: Any, index: int, number: int) -> None:
    """Set a counter, and wake the processes that wait for it."""

def wait_for_number(words: Any, index: int, number: int, seconds: float) -> bool:
    """Sleep until a counter reaches a number; return whether it has."""

def ring_segment_bytes(num_ranks: int) -> int:
    """Bytes of the segment of one of so many ranks. Linux only, as the next two."""

class RingOperation:
    """A message that was posted."""

class Rings:
    """The rings of a rank to the other ranks of its host; see ``reshard.runtime.transport.shared_memory``."""

    def __init__(self, own: Any, index: int) -> None: ...
    def add(self, number: int, segment: Any, process: int) -> bool: ...
    def reaches(self, number: int) -> bool: ...
    def send(self, number: int, tag: int, boxes: Any) -> RingOperation: ...
    def recv(self, number: int, tag: int, boxes: Any) -> RingOperation: ...
    def wait(self, operation: RingOperation, seconds: float) -> bool: ...
    def close(self) -> None: ...

class PipelineModel:
    def __init__(
        self,
        seconds: Any,
        bytes: Any,
        pp_rank: Any,
        src: Any,
        dst: Any,
        channel_seconds: Any,
        load_offsets: Any,
        load_link: Any,
        load_seconds: Any,
        num_microbatches: int,
    ) -> None: ...
    def order(
        self,
        max_in_flight: Any,
        pp_rank_bytes: Any,
        splits: Any,
        forward_first: bool,
        weights_first: bool,
        patience: float,
        group: int,
    ) -> list[list[int]]: ...
    def ends(self, order: list[list[int]], recvs_ahead: int) -> list[float]: ...
    def peak_bytes(self, order: list[list[int]]) -> list[float]: ...

class DigestedRegions:
    """Regions that are digested by one call; see ``reshard.weights.model.region_digests``."""

    def __init__(self) -> None: ...
    def add(self, words: Any, index_strides: Any, first: int) -> None:
        """Add a region of unsigned integers, whose memory is kept."""

    def digest(self, out: Any) -> None:
        """Write the digest of what each region holds now."""
