"""The order in which the ports of hosts exchange data, so that each passes one message at a time without waiting."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class PortOrder:
    """Numbers of ports, in the order in which they exchange data. A port is a NIC, and either sends or receives.

    Ports that send to a common port, directly or through others, are one component. In slot t, port a of the senders of
    a component sends to port a + t of its receivers, modulo their number. If there are more senders, a port receives
    from several of them at once, which are its lanes.

    Attributes:
        component: ``(ports,)`` the component of each port.
        number: ``(ports,)`` number of each port among the senders or the receivers of its component.
        num_receivers: ``(ports,)`` number of receivers of its component, at least 1.
        is_complete: whether every sender of a component sends to all its receivers equally often, so that none waits.
    """

    component: np.ndarray
    number: np.ndarray
    num_receivers: np.ndarray
    is_complete: bool

    @classmethod
    def of(
        cls, senders: tuple[np.ndarray, np.ndarray], receivers: tuple[np.ndarray, np.ndarray], num_ports: int
    ) -> PortOrder:
        """The order of ports.

        Args:
            senders, receivers: ``(ports, labels)`` of equal length. A port that sends with a label sends to all ports
                that receive with it.
            num_ports: the number of all ports.
        """
        port, label = (np.concatenate(pair) for pair in zip(senders, receivers, strict=True))
        component = _find_components(port, label, num_ports)
        number = np.zeros(num_ports, dtype=np.int64)
        for ports, _ in (senders, receivers):
            ports = np.unique(ports)
            order = ports[np.argsort(component[ports], kind="stable")]
            firsts, counts = np.unique(component[order], return_index=True, return_counts=True)[1:]
            number[order] = np.arange(len(order)) - np.repeat(firsts, counts)
        receiving = component[np.unique(receivers[0])]
        num_receivers = np.maximum(np.bincount(receiving, minlength=num_ports)[component], 1)
        is_complete = _are_complete(senders, receivers, component)
        return cls(component, number, num_receivers, is_complete)

    @cached_property
    def lane(self) -> np.ndarray:
        """``(ports,)`` the lane in which each sending port sends."""
        return self.number // self.num_receivers

    def slot(self, sender: np.ndarray, receiver: np.ndarray) -> np.ndarray:
        """The slots of messages between ports."""
        return (self.number[receiver] - self.number[sender]) % self.num_receivers[sender]

    def equals(self, other: PortOrder) -> bool:
        """Whether the ports have the same numbers."""
        return np.array_equal(self.component, other.component) and np.array_equal(self.number, other.number)


def _find_components(port: np.ndarray, label: np.ndarray, num_ports: int) -> np.ndarray:
    """``(ports,)`` the lowest port that common labels join with it."""
    component = np.arange(num_ports)
    while True:
        of_label = np.full(int(label.max(initial=0)) + 1, num_ports)
        np.minimum.at(of_label, label, component[port])
        lower = component.copy()
        np.minimum.at(lower, port, of_label[label])
        lower = lower[lower]
        if np.array_equal(lower, component):
            return component
        component = lower


def _are_complete(
    senders: tuple[np.ndarray, np.ndarray], receivers: tuple[np.ndarray, np.ndarray], component: np.ndarray
) -> bool:
    """Whether every sender of a component sends to all its receivers equally often.

    The test is an equation of matrices, checked by a product with a vector (Freivalds): the sum of the numbers of the
    receivers of all messages of a sender must be that of its share of the messages.
    """
    port, label = receivers
    count = len(component)
    num_labels = 1 + int(max(label.max(initial=0), senders[1].max(initial=0)))
    number = np.arange(count) * 40503 % 65521
    sums = np.zeros((2, num_labels), dtype=np.int64)
    np.add.at(sums[0], label, 1)
    np.add.at(sums[1], label, number[port])
    of_sender = np.zeros((2, count), dtype=np.int64)
    np.add.at(of_sender.T, senders[0], sums.T[senders[1]])
    receiving = np.unique(port)
    size, total = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    np.add.at(size, component[receiving], 1)
    np.add.at(total, component[receiving], number[receiving])
    sending = np.unique(senders[0])
    times, weighted = of_sender[:, sending]
    return bool((weighted * size[component[sending]] == times * total[component[sending]]).all())
