"""Translate a topology into ``ip`` and ``tc`` commands that create the links of an emulated cluster.

Each NIC is one end of a veth pair. The other end is a port of a bridge: that of the host's pod, or the core bridge. A
pod's bridge connects to the core bridge by another veth pair. Token buckets on both ends shape both directions. Pure
acknowledgements have priority, as in the default queues of Linux (fq_codel, fq): queued after their host's own data,
they would slow down its senders. MAC addresses are fixed and known to all hosts, so no ARP traffic uses the links.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import astuple, dataclass, replace

from reshard.topology import Link, Topology

#: TCP payload as a part of the rate, at MTU 1500: 1448 of every 1514 bytes.
PAYLOAD_SHARE = 1448 / 1514
#: A smaller burst reduces the rate; a larger one lets small tensors pass unshaped.
_BURST_BYTES = 131072
#: Deep queues avoid packet loss. A Reno flow that lost many packets keeps a small window, and then fills only two
#: thirds of a link: a broadcast after a run of plain sends took 1.4 times as long.
QUEUE_MILLISECONDS = 100
#: Send buffers hold 2 ms of a gigabit link, about as long as the usual 4 MB hold on a fast link. With 4 MB a sender
#: could complete several messages before the first one left its host, so a plan's window would have no effect.
_SEND_BUFFER_BYTES = 262144
#: Burst and send buffer shrink in proportion if the cluster's fastest link is below this rate (bytes per second), down
#: to this share at most: at 1/16, link rates varied by more than 3 % between two measurements.
_SLOW_RATE, _MIN_SHARE = 5e7, 0.25
#: Message latency given to planners, per rank of the cluster because all ranks share the CPUs. With 0 they would cut
#: regions into so many chunks that the CPUs, not the links, would be the bottleneck.
MESSAGE_SECONDS_OF_RANK = 1e-5
#: Cost of a switch to another sender while all hosts are busy. Predictions use measured values instead of these two.
SENDER_CHANGE_SECONDS = 8e-4
_QUANTUM_BYTES = 60000
#: TCP settings besides the send buffer. With slow start after idle, one turn in three took 12 % longer.
#: With the default pacing ratio of 120 %, TCP small queues allow a connection only 1 ms of its pacing rate in the
#: host's queue. After its window was halved once, it keeps half as much there as another connection, so the two share a
#: link 1:2 until the end of the run. The window halves even without loss: a tail loss probe triggers it if the receiver
#: was scheduled late. Tail loss probes stay on, because without them connections stalled for 200 ms now and then.
TCP_SETTINGS = (
    ("tcp_congestion_control", "reno"),
    ("tcp_no_metrics_save", "1"),
    ("tcp_pacing_ca_ratio", "1000"),
    ("tcp_slow_start_after_idle", "0"),
)
#: Address of the store, on the core bridge.
CLUSTER_ADDRESS = "10.77.0.1"
CLUSTER_HARDWARE = "02:77:00:00:00:01"
_PREFIX = 16


@dataclass(frozen=True)
class LinkCommands:
    """Command lines for ``ip -batch`` and ``tc -batch``."""

    ip: tuple[str, ...]
    tc: tuple[str, ...]

    def run(self) -> None:
        """Run all commands in the caller's network namespace.

        Raises:
            OSError: a command failed.
        """
        environment = os.environ | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"}
        for tool, lines in (("ip", self.ip), ("tc", self.tc)):
            if lines:
                text = "\n".join(lines) + "\n"
                done = subprocess.run(
                    [tool, "-batch", "-"], input=text, text=True, capture_output=True, check=False, env=environment
                )
                if done.returncode:
                    raise OSError(f"{tool} failed: {done.stderr.strip() or done.stdout.strip()}")


def address(host: int, nic: int) -> str:
    """IPv4 address of a NIC."""
    return f"10.77.{host + 1}.{nic + 1}"


def interface(nic: int) -> str:
    """Interface name of a NIC inside its host."""
    return f"nic{nic}"


def port_name(host: int, nic: int) -> str:
    """Interface name of the bridge end of a NIC's veth pair, in the cluster's namespace."""
    return f"h{host}n{nic}"


def _hardware(host: int, nic: int) -> str:
    return f"02:77:00:{host + 1:02x}:{nic + 1:02x}:01"


def _scaled(nbytes: int, topology: Topology) -> int:
    """Scale a size chosen for fast links down for a cluster with only slow links."""
    fastest = max(rate for host in topology.hosts for nic in host.nics for rate in astuple(nic))
    return round(nbytes * min(1.0, max(_MIN_SHARE, fastest / _SLOW_RATE)))


def send_buffer_bytes(topology: Topology) -> int:
    """Send buffer of each connection."""
    return _scaled(_SEND_BUFFER_BYTES, topology)


def burst_bytes(topology: Topology) -> int:
    """Bytes that an idle link passes at once before its rate limit applies."""
    return _scaled(_BURST_BYTES, topology)


def _shape(device: str, bytes_per_second: float, burst: int) -> list[str]:
    """``tc`` commands that limit a device's rate: two classes share one token bucket, pure acknowledgements first."""
    bits = round(8 * bytes_per_second)
    room = round(bytes_per_second * QUEUE_MILLISECONDS / 1000)
    whole = f"rate {bits}bit burst {burst} ceil {bits}bit cburst {burst} quantum {_QUANTUM_BYTES}"
    part = f"rate 8000bit burst 1600 ceil {bits}bit cburst {burst} quantum {_QUANTUM_BYTES}"
    return [
        f"qdisc add dev {device} root handle 1: htb default 2",
        f"class add dev {device} parent 1: classid 1:10 htb {whole}",
        f"class add dev {device} parent 1:10 classid 1:1 htb {part} prio 0",
        f"class add dev {device} parent 1:10 classid 1:2 htb {part} prio 1",
        f"qdisc add dev {device} parent 1:1 bfifo limit {room}",
        f"qdisc add dev {device} parent 1:2 bfifo limit {room}",
        # TCP packets below 64 bytes
        f"filter add dev {device} parent 1: protocol ip u32 "
        "match ip protocol 6 0xff match u16 0 0xffc0 at 2 flowid 1:1",
    ]


def etc_hosts(topology: Topology) -> str:
    """``/etc/hosts`` with the names of all hosts and NICs, as IPv4 and as IPv4-mapped IPv6 addresses."""
    rows = [("127.0.0.1", "localhost"), (CLUSTER_ADDRESS, "cluster")]
    for host in range(topology.num_hosts):
        for nic in range(len(topology.host(host).nics)):
            rows.append((address(host, nic), f"host{host}-{interface(nic)}" if nic else f"host{host}"))
    return "".join(f"{known} {name}\n::ffff:{known} {name}\n" for known, name in rows)


def cluster_link_commands(topology: Topology, host_pids: list[int]) -> LinkCommands:
    """Commands for bridges, uplinks and the veth pair of each NIC, whose other end moves to its host's namespace.

    Args:
        host_pids: a process in the network namespace of each host.
    """
    ip = [
        "link set lo up",
        f"link add core address {CLUSTER_HARDWARE} type bridge",
        f"addr add {CLUSTER_ADDRESS}/{_PREFIX} dev core",
    ]
    tc: list[str] = []
    burst = burst_bytes(topology)
    for number, pod in enumerate(topology.pods):
        ip += [f"link add pod{number} type bridge", f"link add up{number} type veth peer name down{number}"]
        ip += [f"link set up{number} master pod{number}", f"link set down{number} master core"]
        ip += [f"link set {name}{number} up" for name in ("pod", "up", "down")]
        tc += _shape(f"up{number}", pod.egress_bytes_per_second, burst)
        tc += _shape(f"down{number}", pod.ingress_bytes_per_second, burst)
    for number, pid in enumerate(host_pids):
        host = topology.host(number)
        bridge = "core" if host.pod is None else f"pod{host.pod}"
        for nic, link in enumerate(host.nics):
            name = port_name(number, nic)
            ip.append(
                f"link add {name} type veth peer name {interface(nic)} address {_hardware(number, nic)} netns {pid}"
            )
            ip += [f"link set {name} master {bridge}", f"link set {name} up"]
            tc += _shape(name, link.ingress_bytes_per_second, burst)
            ip.append(f"neigh add {address(number, nic)} lladdr {_hardware(number, nic)} dev core nud permanent")
    ip.append("link set core up")
    return LinkCommands(tuple(ip), tuple(tc))


def host_link_commands(topology: Topology, number: int, nic_pids: list[int]) -> LinkCommands:
    """Commands for the namespace of one host. Its first NIC stays; each other NIC moves to a separate namespace.

    Gloo does not bind its sockets to an address, so the route of a namespace decides which NIC a rank uses. The NICs of
    a host reach each other over an unshaped bridge inside the host.

    Args:
        nic_pids: a process in the network namespace of each NIC but the first.
    """
    ip = ["link set lo up"]
    if nic_pids:
        ip += ["link add inside type bridge", "link set inside mtu 65535 up"]
    for nic, pid in enumerate(nic_pids, start=1):
        ip.append(f"link set {interface(nic)} netns {pid}")
        ip += [f"link add in{nic} type veth peer name inside netns {pid}"]
        ip += [f"link set in{nic} mtu 65535 master inside up", f"route add {address(number, nic)} dev inside"]
    own = nic_link_commands(topology, number, 0)
    routes = [line for line in ip if line.startswith("route")]
    return LinkCommands((*(line for line in ip if line not in routes), *own.ip[1:], *routes), own.tc)


def nic_link_commands(topology: Topology, number: int, nic: int) -> LinkCommands:
    """Commands for the namespace of one NIC: its address, neighbours, routes and shaping."""
    name, own = interface(nic), address(number, nic)
    ip = ["link set lo up", f"addr add {own}/{_PREFIX} dev {name}", f"link set {name} up"]
    ip.append(f"neigh add {CLUSTER_ADDRESS} lladdr {CLUSTER_HARDWARE} dev {name} nud permanent")
    if nic:
        ip.append("link set inside mtu 65535 up")
    for other in range(topology.num_hosts):
        for far in range(len(topology.host(other).nics)):
            if other != number:
                hardware = _hardware(other, far)
                ip.append(f"neigh add {address(other, far)} lladdr {hardware} dev {name} nud permanent")
            elif nic and far != nic:
                ip.append(f"route add {address(other, far)} dev inside")
    rate = topology.host(number).nics[nic].egress_bytes_per_second
    return LinkCommands(tuple(ip), tuple(_shape(name, rate, burst_bytes(topology))))


def nominal(topology: Topology) -> Topology:
    """The topology for planning and simulation: payload rates, buffers and message costs of the emulated links."""

    def carried(link: Link) -> Link:
        return Link(link.egress_bytes_per_second * PAYLOAD_SHARE, link.ingress_bytes_per_second * PAYLOAD_SHARE)

    hosts = tuple(replace(host, nics=tuple(carried(nic) for nic in host.nics)) for host in topology.hosts)
    return replace(
        topology,
        hosts=hosts,
        pods=tuple(carried(pod) for pod in topology.pods),
        send_buffer_bytes=send_buffer_bytes(topology),
        burst_bytes=round(burst_bytes(topology) * PAYLOAD_SHARE),
        latency_seconds=MESSAGE_SECONDS_OF_RANK * len(topology.host_of_rank),
        sender_change_seconds=SENDER_CHANGE_SECONDS,
    )
