"""How the links of an emulated cluster are made: a topology as commands for ``ip`` and ``tc``.

Every host has one veth pair per NIC; its far end is a port of the bridge, of the cluster or of the host's pod. A pod's
bridge hangs from the cluster's by another pair. A token bucket on both ends shapes both directions, in which bare
acknowledgements go first, as they do in the queues that Linux has by default (fq_codel, fq): behind the data of their
own host they would hold up those who send to it. Addresses of hardware are given, and known to everyone, so that no ARP
crosses the links.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import astuple, dataclass, replace

from reshard.topology.model import Port, Topology

#: What a link of MTU 1500 carries of its rate as TCP payload: 1448 of every 1514 bytes.
PAYLOAD_SHARE = 1448 / 1514
#: Smaller loses rate, larger lets small tensors through unshaped.
_BURST_BYTES = 131072
#: Deep queues, so that nothing is lost: a flow of Reno that lost much keeps a small window long after the others have
#: ended, and fills two thirds of a link (a broadcast behind a run of plain sends took 1.4 times as long).
QUEUE_MILLISECONDS = 100
#: Send buffers hold 2 ms of a gigabit link, about what the usual 4 MB hold of a fast one. With 4 MB a sender would be
#: done with several messages before the first of them has left its host, and no window would mean anything.
_SEND_BUFFER_BYTES = 262144
#: Both are smaller in a cluster whose fastest link has fewer bytes per second than this, but no less than a part of
#: them: with a sixteenth, links moved by more than 3 % between two measurements.
_SLOW_RATE, _LEAST_SHARE = 5e7, 0.25
#: What planners are told that a message costs for each rank, as all of them share the processors: with 0 they would
#: cut regions into so many chunks that the processors, not the links, were busy.
MESSAGE_SECONDS_OF_RANK = 1e-5
#: And for its turn at its receiver, with all hosts at work. Predictions do not use either, but what was measured.
TURN_SECONDS = 8e-4
_QUANTUM_BYTES = 60000
#: Beside the size of send buffers. A connection that starts slowly again behind every pause made one turn in three 12 %
#: longer than the others. One whose window was halved once may keep, at the usual pacing ratio of 120 %, only half as
#: much in its host's queue as others (a millisecond of its pacing rate: "small queues"); two would then share a link
#: 2 to 1 until the run ends. What halves it where nothing is lost: a probe for lost ends of bursts, when its receiver
#: was late for a processor. Without such probes connections stood still for 200 ms now and then.
TCP_SETTINGS = (
    ("tcp_congestion_control", "reno"),
    ("tcp_no_metrics_save", "1"),
    ("tcp_pacing_ca_ratio", "1000"),
    ("tcp_slow_start_after_idle", "0"),
)
#: Where ranks find the store.
CLUSTER_ADDRESS = "10.77.0.1"
CLUSTER_HARDWARE = "02:77:00:00:00:01"
_PREFIX = 16


@dataclass(frozen=True)
class Wires:
    """Lines for ``ip -batch`` and ``tc -batch``."""

    ip: tuple[str, ...]
    tc: tuple[str, ...]

    def make(self) -> None:
        """Run both in the namespace of the caller.

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
    """The address of a NIC."""
    return f"10.77.{host + 1}.{nic + 1}"


def interface(nic: int) -> str:
    """The name of a NIC inside its host."""
    return f"nic{nic}"


def port_name(host: int, nic: int) -> str:
    """The name of a NIC's far end, in the cluster's namespace."""
    return f"h{host}n{nic}"


def _hardware(host: int, nic: int) -> str:
    return f"02:77:00:{host + 1:02x}:{nic + 1:02x}:01"


def _scaled(nbytes: int, topology: Topology) -> int:
    """What is given for fast links, in a cluster that may have slow ones only."""
    fastest = max(rate for host in topology.hosts for nic in host.nics for rate in astuple(nic))
    return round(nbytes * min(1.0, max(_LEAST_SHARE, fastest / _SLOW_RATE)))


def send_buffer_bytes(topology: Topology) -> int:
    """Of each connection."""
    return _scaled(_SEND_BUFFER_BYTES, topology)


def burst_bytes(topology: Topology) -> int:
    """What a link that was idle passes at once."""
    return _scaled(_BURST_BYTES, topology)


def _shape(device: str, bytes_per_second: float, burst: int) -> list[str]:
    """Both classes borrow all they send from one token bucket, acknowledgements without data first."""
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
        # TCP in packets of less than 64 bytes
        f"filter add dev {device} parent 1: protocol ip u32 "
        "match ip protocol 6 0xff match u16 0 0xffc0 at 2 flowid 1:1",
    ]


def etc_hosts(topology: Topology) -> str:
    """Names of all hosts and their NICs, also for sockets that speak IPv6 and are given IPv4 addresses."""
    rows = [("127.0.0.1", "localhost"), (CLUSTER_ADDRESS, "cluster")]
    for host in range(topology.num_hosts):
        for nic in range(len(topology.host(host).nics)):
            rows.append((address(host, nic), f"host{host}-{interface(nic)}" if nic else f"host{host}"))
    return "".join(f"{known} {name}\n::ffff:{known} {name}\n" for known, name in rows)


def cluster_wires(topology: Topology, host_pids: list[int]) -> Wires:
    """Bridges, uplinks, and a pair per NIC with one end in the namespace of its host's process."""
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
        for nic, port in enumerate(host.nics):
            name = port_name(number, nic)
            ip.append(
                f"link add {name} type veth peer name {interface(nic)} address {_hardware(number, nic)} netns {pid}"
            )
            ip += [f"link set {name} master {bridge}", f"link set {name} up"]
            tc += _shape(name, port.ingress_bytes_per_second, burst)
            ip.append(f"neigh add {address(number, nic)} lladdr {_hardware(number, nic)} dev core nud permanent")
    ip.append("link set core up")
    return Wires(tuple(ip), tuple(tc))


def host_wires(topology: Topology, number: int, nic_pids: list[int]) -> Wires:
    """In the namespace of a host, whose first NIC stays in it; each other one goes to that of a process.

    Sockets leave by the NIC of their namespace whatever address they were given, as Gloo binds none. The NICs of a
    host reach each other over a bridge of the host, which is not shaped.
    """
    ip = ["link set lo up"]
    if nic_pids:
        ip += ["link add inside type bridge", "link set inside mtu 65535 up"]
    for nic, pid in enumerate(nic_pids, start=1):
        ip.append(f"link set {interface(nic)} netns {pid}")
        ip += [f"link add in{nic} type veth peer name inside netns {pid}"]
        ip += [f"link set in{nic} mtu 65535 master inside up", f"route add {address(number, nic)} dev inside"]
    own = nic_wires(topology, number, 0)
    routes = [line for line in ip if line.startswith("route")]
    return Wires((*(line for line in ip if line not in routes), *own.ip[1:], *routes), own.tc)


def nic_wires(topology: Topology, number: int, nic: int) -> Wires:
    """In the namespace of one NIC of a host: its address, routes and shaping."""
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
    return Wires(tuple(ip), tuple(_shape(name, rate, burst_bytes(topology))))


def nominal(topology: Topology) -> Topology:
    """What the shaped links should carry of TCP payload, and what else a simulation has to know of them."""

    def carried(port: Port) -> Port:
        return Port(port.egress_bytes_per_second * PAYLOAD_SHARE, port.ingress_bytes_per_second * PAYLOAD_SHARE)

    hosts = tuple(replace(host, nics=tuple(carried(nic) for nic in host.nics)) for host in topology.hosts)
    return replace(
        topology,
        hosts=hosts,
        pods=tuple(carried(pod) for pod in topology.pods),
        send_buffer_bytes=send_buffer_bytes(topology),
        burst_bytes=round(burst_bytes(topology) * PAYLOAD_SHARE),
        latency_seconds=MESSAGE_SECONDS_OF_RANK * len(topology.host_of_rank),
        turn_seconds=TURN_SECONDS,
    )
