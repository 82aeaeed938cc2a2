"""An honest slow network on one Linux machine: hosts are network namespaces, wires rate-limited veth pairs.

Everything lives in namespaces of its own, the bridge included: the machine's own network is never touched.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from tempfile import TemporaryFile
from types import FrameType
from typing import IO

from brigata.describe.errors import JobError

_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BURST_S, _LEAST_BURST = 0.0002, 16 * 1024
"""Bytes sent at once after a pause: what 0.2 ms would carry; with 4 ms, 1 MiB goes at 1.7 times the rate."""
_QUEUE = 64 * 1024 * 1024
"""Bytes a wire queues before it drops: more than TCP keeps in flight, so that nothing is sent twice."""
_CONGESTION = "echo reno > /proc/sys/net/ipv4/tcp_congestion_control"
"""What each host runs first. On wires that never drop, Reno sends what the wire takes, as a cluster's fabric
does; BBR probes for bandwidth instead, and 7 senders to each of 8 hosts need 1.6 times their bytes' time."""
_LAST_LINES = 20


@dataclass(frozen=True)
class Host:
    """Where a rank runs: the namespace ``name`` and its interface; without a name, this machine itself."""

    name: str
    address: str
    interface: str

    def command(self, *argv: str) -> list[str]:
        """The command line that runs ``argv`` on this host."""
        return ["ip", "netns", "exec", self.name, *argv] if self.name else list(argv)


def loopback_hosts(count: int) -> list[Host]:
    """This machine ``count`` times over: what ``run_ranks`` needs to run unshaped and without root."""
    return [Host("", "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo")] * count


def parse_rate(text: str) -> float:
    """Bytes per second of a rate such as ``2.5gbit``; units are powers of 1000, as ``tc`` has them."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", text.strip().lower(), re.ASCII)
    bits = float(match[1]) * _BITS[match[2]] if match else 0.0
    if not 1e3 <= bits <= 1e12:
        raise JobError(
            f"rate = {text!r} is refused; write a number and kbit, mbit or gbit, from 1kbit to 1000gbit, "
            "such as 1gbit, 500mbit or 2.5gbit"
        )
    return bits / 8


def check_can_shape(rate: str) -> None:
    """Raise JobError where ``shaped_network(n, rate)`` cannot work; the last check builds one host."""
    parse_rate(rate)
    instead = "leave the rate out to run on the unshaped network"
    if sys.platform != "linux":
        raise JobError(
            f"rate = {rate!r} needs Linux network namespaces, and this is {sys.platform}; {instead}"
        )
    if os.geteuid() != 0:
        raise JobError(f"rate = {rate!r} needs root to make network namespaces; run as root, or {instead}")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        tools = " and ".join(missing)
        raise JobError(
            f"rate = {rate!r} needs {tools} on the PATH; install the package iproute2, or {instead}"
        )
    try:
        with shaped_network(1, rate):
            pass
    except RuntimeError as error:
        raise JobError(f"rate = {rate!r} cannot be had here, because {error}; {instead}") from error


@contextmanager
def shaped_network(hosts: int, rate: str | None, ingress: bool = False) -> Iterator[list[Host]]:
    """Hosts joined by a bridge, torn down on every exit but SIGKILL; SIGTERM and SIGHUP unwind too.

    Args:
        hosts: how many, 1 to 254.
        rate: what each host may send, headers included (0.957 of it is payload); None: unshaped.
        ingress: limit what arrives at a host too, so that its senders share its wire.
    """
    if not 1 <= hosts <= 254:
        raise JobError(f"hosts = {hosts} is refused; a shaped network has 1 to 254 hosts")
    bytes_per_s = parse_rate(rate) if rate is not None else None
    stem = f"brg{os.getpid()}x{secrets.token_hex(3)}"
    bridge = f"{stem}-bridge"
    members = [Host(f"{stem}-{i}", f"10.77.0.{i + 1}", f"veth{i}") for i in range(hosts)]
    with _signals_unwind():
        try:
            _run("ip", "netns", "add", bridge)
            _run("ip", "-n", bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", bridge, "link", "set", "bridge", "up")
            for index, host in enumerate(members):
                _wire(host, bridge, f"port{index}", bytes_per_s, ingress)
            yield members
        finally:
            with _signals_wait():
                _remove([host.name for host in members] + [bridge])


def run_ranks(
    hosts: Sequence[Host], argv: Sequence[str], *, timeout_s: float, port: int = 29500
) -> list[str]:
    """Run ``argv`` once per host as one ``torch.distributed`` world; the standard output of each rank.

    No rank outlives the call: when one fails, is late or an exception strikes, all are killed, children too.

    Raises:
        RuntimeError: a rank failed or was late; the message ends with the last lines of its stderr.
    """
    ranks: list[_Rank] = []
    ended: SimpleQueue[_Rank] = SimpleQueue()
    deadline = time.monotonic() + timeout_s
    with ExitStack() as files, _finally_ended(ranks):
        for index in range(len(hosts)):
            outputs = files.enter_context(TemporaryFile()), files.enter_context(TemporaryFile())
            ranks.append(_Rank(hosts, index, argv, port, outputs))
            threading.Thread(target=ranks[-1].report_end, args=[ended], daemon=True).start()
        running = list(ranks)
        while running:
            try:
                rank = ended.get(timeout=max(deadline - time.monotonic(), 0.0))
            except Empty:
                raise running[0].failure(f"had not finished after {timeout_s:g} s") from None
            if code := rank.process.returncode:
                raise rank.failure(f"exited with code {code}")
            rank.end()
            running.remove(rank)
        return [_text(rank.stdout) for rank in ranks]


class _Rank:
    """A running rank, leader of its own process group; its output goes to files, which never fill up."""

    def __init__(
        self,
        hosts: Sequence[Host],
        index: int,
        argv: Sequence[str],
        port: int,
        outputs: tuple[IO[bytes], IO[bytes]],
    ) -> None:
        host = hosts[index]
        world = {
            "RANK": str(index),
            "LOCAL_RANK": str([other.name for other in hosts[:index]].count(host.name)),
            "WORLD_SIZE": str(len(hosts)),
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": host.interface,
        }
        self.name = f"rank {index} of {len(hosts)}"
        self.stdout, self.stderr = outputs
        self.ended = False
        self.process = subprocess.Popen(
            host.command(*argv),
            env={"OMP_NUM_THREADS": "1"} | os.environ | world,
            stdin=subprocess.DEVNULL,
            stdout=self.stdout,
            stderr=self.stderr,
            start_new_session=True,
        )

    def report_end(self, ended: "SimpleQueue[_Rank]") -> None:
        self.process.wait()
        ended.put(self)

    def end(self) -> None:
        if self.ended:  # by now the number of its group may be another's
            return
        self.ended = True
        with suppress(ProcessLookupError, PermissionError):  # macOS says EPERM where only zombies are left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def failure(self, what: str) -> RuntimeError:
        self.end()
        last = "\n".join(_text(self.stderr).splitlines()[-_LAST_LINES:])
        return RuntimeError(f"{self.name} {what}; the last lines of its stderr:\n{last or '(nothing)'}")


@contextmanager
def _finally_ended(ranks: Iterable[_Rank]) -> Iterator[None]:
    try:
        yield
    finally:
        with _signals_wait():
            for rank in ranks:
                rank.end()


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _wire(host: Host, bridge: str, port: str, rate: float | None, ingress: bool) -> None:
    inside = ("-n", host.name)
    _run("ip", "netns", "add", host.name)
    _run(*host.command("sh", "-c", _CONGESTION))
    _run("ip", *inside, "link", "set", "lo", "up")
    _run("ip", *inside, "link", "add", host.interface, "type", "veth", "peer", "name", port, "netns", bridge)
    _run("ip", *inside, "address", "add", f"{host.address}/24", "dev", host.interface)
    if rate is not None:
        burst = max(int(rate * _BURST_S), _LEAST_BURST)
        # A packet longer than the burst would be cut into frames at the expense of the processor.
        segment = min(burst * 9 // 10, 65536)
        _run("ip", *inside, "link", "set", host.interface, "gso_max_size", str(segment))
        tbf = ["tbf", "rate", f"{round(rate * 8)}bit", "burst", str(burst), "limit", str(burst + _QUEUE)]
        _run("tc", *inside, "qdisc", "add", "dev", host.interface, "root", *tbf)
        if ingress:
            _run("tc", "-n", bridge, "qdisc", "add", "dev", port, "root", *tbf)
    _run("ip", *inside, "link", "set", host.interface, "up")
    _run("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")


def _remove(names: Sequence[str]) -> None:
    """Remove those of the namespaces that exist; what still runs inside would keep them alive."""
    for name in _present(names):
        with suppress(RuntimeError):
            for pid in map(int, _run("ip", "netns", "pids", name).split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with suppress(RuntimeError):
            _run("ip", "netns", "delete", name)
    if left := _present(names):
        raise RuntimeError(f"could not remove the network namespaces {', '.join(left)}")


def _present(names: Iterable[str]) -> list[str]:
    listed = {line.split()[0] for line in _run("ip", "netns", "list").splitlines()}
    return [name for name in names if name in listed]


def _run(*argv: str) -> str:
    # A session of its own: a Ctrl-C at the terminal must not end the command that tears down.
    done = subprocess.run(argv, capture_output=True, text=True, start_new_session=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(argv)}` failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    # Python delivers signals to the main thread only, and a handler that C installed cannot be put back.
    main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in numbers if main and signal.getsignal(number) is not None]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Where SIGTERM or SIGHUP would end the process on the spot, let it leave through every ``finally``."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    fatal = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    with _handled(fatal, leave):
        yield


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Deliver a signal that would interrupt the body after it."""
    caught: list[int] = []
    interrupting = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _handled(interrupting, lambda number, frame: caught.append(number)):
        yield
    if caught:
        signal.raise_signal(caught[0])
