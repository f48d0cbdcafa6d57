"""Reference implementation of ``native/fluid/event_loop.h``, the event loop of the simulator."""

from __future__ import annotations

import itertools
import math
from collections import deque

import numpy as np

from reshard.cost.fluid import Network
from tests.reference.proportional_fairness import share_ports

#: Events are simultaneous if their times differ by less than this fraction of the step.
_TIME_TOLERANCE = 1e-9
#: Rate of a port in bytes per second while its token bucket has bytes.
_AT_ONCE = 1e18
#: A bucket with fewer bytes is empty.
_EMPTY = 1.0


def flow_python(network: Network) -> tuple[np.ndarray, np.ndarray]:
    """``(start, finish)`` of each message in seconds; a message starts when its latency begins.

    Raises:
        ValueError: some message can never start.
    """
    return _Flow(network).run()


class _Stream:
    """The messages in flight between two ranks, oldest first."""

    def __init__(self) -> None:
        self.in_flight: deque[int] = deque()
        self.num_released = 0  # messages in flight that no longer count for the window of their queue
        self.unreleased_bytes = 0.0  # bytes to send up to the end of the first unreleased message
        self.in_overhead = False  # whether the oldest message still occupies its port before its bytes
        self.remaining = 0.0  # work left in the phase of the oldest message
        self.rate = 0.0


class _Flow:
    """The event loop and its state. ``s`` is always the number of a stream."""

    def __init__(self, network: Network) -> None:
        n = network
        count = len(n.queue)
        self.queue, self.stream, self.receiver = n.queue.tolist(), n.stream.tolist(), n.receiver.tolist()
        self.window, self.ahead, self.nbytes = n.window.tolist(), n.ahead.tolist(), n.nbytes.tolist()
        self.overhead_port, self.overhead_bytes = n.overhead_port.tolist(), n.overhead_bytes.tolist()
        self.buffer, self.port_rate = n.buffer.tolist(), n.rate.tolist()
        self.burst = n.burst.tolist()
        self.saved = n.burst.tolist()  # bytes in the token bucket of each port
        self.price = [0.0] * len(self.burst)  # of each port, kept by share_ports between its calls
        self.saving = [0.0] * len(self.burst)  # bytes per second into each bucket, negative while it drains
        self.has_bursts = max(self.burst, default=0.0) > 0
        self.ports = _rows(n.port_offsets, n.port)
        after = _rows(n.after_offsets, n.after)
        self.left = [len(row) for row in after]  # number of unfinished messages that each message waits for
        self.next: list[list[int]] = [[] for _ in range(count)]  # messages that wait for each message
        for message, row in enumerate(after):
            for earlier in row:
                self.next[earlier].append(message)
        self.of_queue = _members(self.queue)
        self.of_receiver = _members(self.receiver)
        self.position = [0] * count  # index among the messages of its receiver
        for row in self.of_receiver:
            for position, message in enumerate(row):
                self.position[message] = position
        self.head = [0] * len(self.of_queue)  # by queue, index of the first message that has not started
        self.done = [0] * len(self.of_queue)  # by queue, index of the first message that counts for its window
        self.released = [False] * count  # messages that no longer count for the window of their queue
        self.first = [0] * len(self.of_receiver)  # by receiver, index of its first unfinished message
        self.blocked: list[list[int]] = [[] for _ in self.of_receiver]  # by receiver, queues whose head waits for it
        self.streams = [_Stream() for _ in self.ports]
        self.active: list[int] = []  # streams with messages in flight, ascending
        self.start = [-1.0] * count
        self.finish = [-1.0] * count
        self.capacity = list(self.port_rate)  # of each port now
        self.path: list[list[int]] = [[] for _ in self.ports]  # ports that each stream passes in its phase
        self.dirty: set[int] = set()  # ports whose streams or capacity changed since the rates were set
        self.now = 0.0
        self.changed = True

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        for queue in range(len(self.of_queue)):
            self.start_from(queue)
        while self.active:
            if self.changed:
                self.share()
                self.changed = False
            step = min(self.until_event(s) / self.streams[s].rate for s in self.active)
            if self.has_bursts:
                step = min(step, self.until_empty())
            limit = step * (1 + _TIME_TOLERANCE)
            self.now += step
            if self.has_bursts:
                self.save(step, limit)
            ended, released = [], []
            for s in self.active:
                stream = self.streams[s]
                ends = stream.remaining / stream.rate <= limit
                if ends:
                    ended.append(s)
                else:
                    stream.remaining -= stream.rate * step
                if not stream.in_overhead:
                    fits = (stream.unreleased_bytes - self.buffer[s]) / stream.rate <= limit
                    stream.unreleased_bytes -= stream.rate * step
                    if fits:
                        stream.unreleased_bytes = min(stream.unreleased_bytes, self.buffer[s])
                    if ends or stream.num_released < len(stream.in_flight):
                        released.append(s)
            for s in released:
                freed = self.release(s)
                if freed is not None:
                    self.start_from(freed)
            for s in ended:
                self.end_phase(s)
        if any(done < 0 for done in self.finish):
            raise ValueError(f"message {self.finish.index(-1.0)} can never start")
        return np.array(self.start), np.array(self.finish)

    def until_event(self, s: int) -> float:
        """Work that a stream does until one of its messages ends a phase or is released."""
        stream = self.streams[s]
        if not stream.in_overhead and stream.num_released < len(stream.in_flight):
            until_release = stream.unreleased_bytes - self.buffer[s]
            if 0 < until_release < stream.remaining:
                return until_release
        return stream.remaining

    def until_empty(self) -> float:
        """Seconds until the next bucket is empty."""
        ports = zip(self.saved, self.saving, strict=True)
        return min((saved / -saving for saved, saving in ports if saving < 0 < saved), default=math.inf)

    def save(self, step: float, limit: float) -> None:
        """Update the token buckets after a step. Buckets that drain within ``limit`` seconds become empty."""
        for port, saving in enumerate(self.saving):
            if saving < 0 < self.saved[port] and self.saved[port] / -saving <= limit:
                self.saved[port] = 0.0
                self.changed = True
            else:
                self.saved[port] = min(max(self.saved[port] + saving * step, 0.0), self.burst[port])

    def start_from(self, queue: int) -> None:
        """Put messages of a queue in flight, in order, until one must wait."""
        row = self.of_queue[queue]
        while self.head[queue] < len(row):
            message = row[self.head[queue]]
            if self.left[message] or self.head[queue] - self.done[queue] >= self.window[message]:
                return
            receiver = self.receiver[message]
            if self.position[message] >= self.first[receiver] + self.ahead[message]:
                self.blocked[receiver].append(queue)
                return
            self.head[queue] += 1
            s = self.stream[message]
            stream = self.streams[s]
            if stream.num_released == len(stream.in_flight):  # this becomes the first unreleased message
                stream.unreleased_bytes = self.nbytes[message] + self.unsent_bytes(s)
            stream.in_flight.append(message)
            if len(stream.in_flight) == 1:
                self.begin(s)
                self.active.append(s)
                self.active.sort()
                self.changed = True
            self.release(s)

    def unsent_bytes(self, s: int) -> float:
        """Bytes that the messages in flight still have to send."""
        stream = self.streams[s]
        if not stream.in_flight:
            return 0.0
        rest = 0.0
        for message in itertools.islice(stream.in_flight, 1, None):
            rest += self.nbytes[message]
        return (self.nbytes[stream.in_flight[0]] if stream.in_overhead else stream.remaining) + rest

    def release(self, s: int) -> int | None:
        """Release messages whose unsent bytes fit the send buffer; return their queue, or None without any."""
        stream = self.streams[s]
        queue = None
        while stream.num_released < len(stream.in_flight) and (
            stream.unreleased_bytes <= self.buffer[s] * (1 + _TIME_TOLERANCE)
        ):
            queue = self.queue[stream.in_flight[stream.num_released]]
            self.mark_released(stream.in_flight[stream.num_released])
            stream.num_released += 1
            if stream.num_released < len(stream.in_flight):
                stream.unreleased_bytes += self.nbytes[stream.in_flight[stream.num_released]]
        return queue

    def mark_released(self, message: int) -> None:
        """Mark a message as released; the window advances past it once all earlier messages are released too."""
        self.released[message] = True
        queue = self.queue[message]
        row = self.of_queue[queue]
        while self.done[queue] < len(row) and self.released[row[self.done[queue]]]:
            self.done[queue] += 1

    def begin(self, s: int) -> None:
        """Begin the first phase of the oldest message of a stream."""
        stream = self.streams[s]
        message = stream.in_flight[0]
        self.start[message] = self.now
        in_overhead = self.overhead_bytes[message] > 0
        if in_overhead:
            self.changed = True
        stream.in_overhead = in_overhead
        stream.remaining = self.overhead_bytes[message] if in_overhead else self.nbytes[message]
        self.set_path(s)

    def end_phase(self, s: int) -> None:
        """End the latency phase of the oldest message of a stream, or finish the message."""
        stream = self.streams[s]
        message = stream.in_flight[0]
        if stream.in_overhead:
            stream.in_overhead = False
            stream.remaining = self.nbytes[message]
            self.changed = True
            self.set_path(s)
            return
        queue = self.queue[message]
        if stream.num_released:
            stream.num_released -= 1
        else:
            self.mark_released(message)
            if len(stream.in_flight) > 1:
                stream.unreleased_bytes = self.nbytes[stream.in_flight[1]]
        stream.in_flight.popleft()
        self.finish[message] = self.now
        if stream.in_flight:
            self.begin(s)
        else:
            self.active.remove(s)
            self.changed = True
            self.set_path(s)
        receiver = self.receiver[message]
        row = self.of_receiver[receiver]
        before = self.first[receiver]
        while self.first[receiver] < len(row) and self.finish[row[self.first[receiver]]] >= 0:
            self.first[receiver] += 1
        self.start_from(queue)
        for position in range(before, self.first[receiver]):
            for later in self.next[row[position]]:
                self.left[later] -= 1
                if not self.left[later]:
                    self.start_from(self.queue[later])
        if self.first[receiver] > before:
            waiting, self.blocked[receiver] = self.blocked[receiver], []
            for blocked in waiting:
                self.start_from(blocked)

    def set_path(self, s: int) -> None:
        """Move a stream to the ports of its present phase."""
        stream = self.streams[s]
        path = [] if not stream.in_flight else [self.overhead_port[s]] if stream.in_overhead else self.ports[s]
        if path is not self.path[s]:
            self.dirty.update(self.path[s], path)
            self.path[s] = path

    def share(self) -> None:
        """Set the rates of the streams in each component (streams connected by ports) that has a dirty port."""
        held = {self.overhead_port[s] for s in self.active if self.streams[s].in_overhead}
        capacity = [
            _AT_ONCE if saved > _EMPTY and port not in held else rate  # bursts do not shorten latency phases
            for port, (saved, rate) in enumerate(zip(self.saved, self.port_rate, strict=True))
        ]
        self.dirty.update(port for port, most in enumerate(capacity) if most != self.capacity[port])
        self.capacity = capacity
        while self.dirty:
            ports, before = {min(self.dirty)}, 0
            while len(ports) > before:
                before = len(ports)
                ports.update(*(self.path[s] for s in self.active if not ports.isdisjoint(self.path[s])))
            self.dirty -= ports
            component = [s for s in self.active if not ports.isdisjoint(self.path[s])]
            rates = share_ports([self.path[s] for s in component], capacity, self.price, joint=True)
            for s, rate in zip(component, rates, strict=True):
                self.streams[s].rate = rate
        if self.has_bursts:
            self.saving = list(self.port_rate)
            for s in self.active:
                for port in self.path[s]:
                    self.saving[port] -= self.streams[s].rate


def _rows(at: np.ndarray, values: np.ndarray) -> list[list[int]]:
    flat, ends = values.tolist(), at.tolist()
    return [flat[a:b] for a, b in itertools.pairwise(ends)]


def _members(keys: list[int]) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(max(keys, default=-1) + 1)]
    for message, key in enumerate(keys):
        rows[key].append(message)
    return rows
