import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped, unused-ignore]
import pytest

from brigata.describe import JobError
from brigata.measure import namespaces
from brigata.measure.namespaces import check_can_shape, loopback_hosts, parse_rate, run_ranks, shaped_network

MEGABYTES = 20
NOMINAL_S = MEGABYTES * 1e6 / parse_rate("1gbit")


@pytest.fixture(scope="module")
def permitted() -> None:
    try:
        check_can_shape("1gbit")
    except JobError as error:
        pytest.skip(str(error))


needs_namespaces = pytest.mark.usefixtures("permitted")

SEND_TO_RANK_0 = """
    import os, socket, sys, time
    rank, world, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        for attempt in range(1000):
            try:
                wire = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                time.sleep(0.005)
        wire.recv(1)
        wire.sendall(bytes(size))
        wire.shutdown(socket.SHUT_WR)
    else:
        server = socket.create_server(address)
        wires = [server.accept()[0] for _ in range(world - 1)]
        start = time.perf_counter()
        for wire in wires:
            wire.send(b"x")
        left = (world - 1) * size
        while left:
            for wire in wires:
                left -= len(wire.recv(min(left, 1 << 18))) if left else 0
        print(time.perf_counter() - start)
"""


def _python(code: str, *argv: object) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *map(str, argv)]


def _left_behind(pid: int) -> str:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listed.splitlines() if line.startswith(f"brg{pid}x"))


def _transfer_s(senders: int, ingress: bool = False) -> float:
    """Best of three: a busy machine can only make a transfer slower."""
    with shaped_network(1 + senders, "1gbit", ingress) as hosts:
        argv = _python(SEND_TO_RANK_0, MEGABYTES * 1_000_000 // senders)
        return min(float(run_ranks(hosts, argv, timeout_s=10)[0]) for _ in range(3))


@needs_namespaces
def test_a_wire_carries_its_nominal_rate_and_no_more() -> None:
    assert 0.98 * NOMINAL_S < _transfer_s(senders=1) < 1.5 * NOMINAL_S


@needs_namespaces
def test_two_senders_share_the_wire_of_a_receiver_limited_on_ingress() -> None:
    assert 0.98 * NOMINAL_S < _transfer_s(senders=2, ingress=True) < 1.5 * NOMINAL_S


@needs_namespaces
def test_nothing_is_left_after_a_normal_exit_nor_after_an_exception() -> None:
    with shaped_network(2, None) as hosts:
        assert all(host.name in _left_behind(os.getpid()) for host in hosts)
        straggler = subprocess.Popen(hosts[0].command("sleep", "60"))
    assert not _left_behind(os.getpid())
    assert straggler.wait(timeout=5) == -signal.SIGKILL

    with pytest.raises(ZeroDivisionError), shaped_network(2, "500mbit"):
        raise ZeroDivisionError
    assert not _left_behind(os.getpid())


@needs_namespaces
@pytest.mark.parametrize("after", range(0, 18, 3))
def test_nothing_is_left_when_the_setup_fails_half_way(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    run = namespaces._run
    calls: list[tuple[str, ...]] = []

    def failing(*argv: str) -> str:
        calls.append(argv)
        if len(calls) == after + 1:
            raise RuntimeError("the machine said no")
        return run(*argv)

    monkeypatch.setattr(namespaces, "_run", failing)
    with pytest.raises(RuntimeError, match="said no"), shaped_network(2, "1gbit", ingress=True):
        pass
    assert not _left_behind(os.getpid())


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    code = """
        import signal, sys
        from brigata.measure.namespaces import run_ranks, shaped_network
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children ignore it
        with shaped_network(2, "1gbit") as hosts:
            print("up", flush=True)
            run_ranks(hosts, ["sleep", "60"], timeout_s=60)
    """
    with subprocess.Popen(_python(code), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        assert _left_behind(child.pid)
        child.send_signal(number)
        assert child.wait(timeout=5) != 0
    assert not _left_behind(child.pid)


def test_the_ranks_form_a_world_and_their_outputs_come_back_in_order() -> None:
    code = """
        import os, time
        names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
        time.sleep(0.1 * (os.environ["RANK"] == "0"))
        print(*(os.environ[name] for name in names.split()))
    """
    outputs = run_ranks(loopback_hosts(2), _python(code), timeout_s=10, port=4242)
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    assert outputs == [f"{rank} {rank} 2 127.0.0.1 4242 {threads}\n" for rank in range(2)]


def test_a_failing_rank_is_named_and_the_others_are_killed(tmp_path: Path) -> None:
    code = """
        import os, pathlib, subprocess, sys, time
        if os.environ["RANK"] == "1":
            while len(list(pathlib.Path(sys.argv[1]).iterdir())) < 2:
                time.sleep(0.01)
            sys.exit("no such layer")
        child = subprocess.Popen(["sleep", "60"])
        for pid in (os.getpid(), child.pid):
            pathlib.Path(sys.argv[1], str(pid)).touch()
        time.sleep(60)
    """
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 exited with code 1; [^\n]*\nno such layer"):
        run_ranks(loopback_hosts(2), _python(code, tmp_path), timeout_s=30)
    assert time.monotonic() - start < 10
    assert all(_ends(int(file.name)) for file in tmp_path.iterdir())


def _ends(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody collects, within two seconds."""
    for _ in range(200):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_late_rank_is_named_with_what_it_said() -> None:
    code = """
        import os, sys, time
        print("waiting for rank 7", file=sys.stderr, flush=True)
        time.sleep(60 if os.environ["RANK"] == "1" else 0)
    """
    with pytest.raises(
        RuntimeError, match=r"rank 1 of 2 had not finished after 0.5 s;[^\n]*\nwaiting for rank 7"
    ):
        run_ranks(loopback_hosts(2), _python(code), timeout_s=0.5)


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("1gbit", 125e6), ("2.5Gbit", 312.5e6), ("500mbit", 62.5e6), ("64kbit", 8e3)]
)
def test_a_rate_is_read_as_tc_reads_it(text: str, bytes_per_s: float) -> None:
    assert parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    "text", ["", "fast", "1", "1gb", "500mbps", "1gibit", "-1gbit", "0gbit", "2,5gbit", "1e400gbit"]
)
def test_nonsense_is_no_rate(text: str) -> None:
    for refuse in (parse_rate, check_can_shape):
        with pytest.raises(JobError, match="such as 1gbit") as refusal:
            refuse(text)
        assert repr(text) in str(refusal.value)


def test_who_cannot_shape_is_told_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(JobError, match="run as root"):
        check_can_shape("1gbit")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(JobError, match="needs ip and tc"):
        check_can_shape("1gbit")
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(JobError, match="needs Linux"):
        check_can_shape("1gbit")


@pytest.mark.parametrize("hosts", [0, 255])
def test_a_network_without_room_for_its_hosts_is_refused(hosts: int) -> None:
    with pytest.raises(JobError, match="1 to 254"), shaped_network(hosts, None):
        pass
