"""Configuration and command line of a simulated node; the packets between its processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpsd.base.errors import GpuError, NotRunningError, UsageError
from mpsd.gpu.simulated import node, packets, paths
from mpsd.gpu.simulated.__main__ import main
from mpsd.gpu.simulated.backend import open_simulated, stop_simulated
from mpsd.gpu.simulated.machine.timers import Timers


def test_a_configuration_is_kept(tmp_path: Path) -> None:
    assert node.NodeConfig.load(str(tmp_path)) == node.NodeConfig()
    chosen = node.NodeConfig(gpus=3, memory_bytes=2 << 30, seed=7)
    chosen.save(str(tmp_path))
    assert node.NodeConfig.load(str(tmp_path)) == chosen


@pytest.mark.parametrize(
    "text", ["", "[]", '{"gpus": 0}', '{"gpus": 17}', '{"colour": 1}', '{"memory_bytes": 5}']
)
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "node.json").write_text(text)
    with pytest.raises(UsageError):
        node.NodeConfig.load(str(tmp_path))


def test_gpus_are_the_same_on_every_node() -> None:
    assert node.gpu(0, 1 << 30) == node.gpu(0, 1 << 30)
    assert node.gpu(0, 1 << 30).uuid != node.gpu(1, 1 << 30).uuid
    assert node.gpu(15, 1 << 30).pci == "0000:10:00.0"


def test_where_a_node_is() -> None:
    assert paths.run_directory({"MPSD_SIM_DIR": "/x", "XDG_RUNTIME_DIR": "/run/me"}) == "/x"
    assert paths.run_directory({"XDG_RUNTIME_DIR": "/run/me"}) == "/run/me/mpsd-sim"
    assert paths.run_directory({}) == f"/tmp/mpsd-sim-{os.getuid()}"


@pytest.mark.parametrize("words", [["stop"], ["inject", "79"]])
def test_commands_to_a_node_that_does_not_run(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--dir", str(tmp_path)]) == 3
    assert "no simulated GPU serves" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_named_as_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = [sys.executable, "-m", "mpsd.gpu.simulated", "gpu", "--detach", "--dir", str(tmp_path)]
    subprocess.run(start, check=True, timeout=90)
    try:
        assert main(["inject", "79", "--gpu", "5", "--dir", str(tmp_path)]) == 1
        assert capsys.readouterr().err == "refused: there is no such GPU\n"
    finally:
        assert main(["stop", "--dir", str(tmp_path)]) == 0


def test_a_directory_that_cannot_be_is_an_error_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["gpu", "--dir", str(tmp_path / "file" / "n")]) == 1
    assert "cannot use" in capsys.readouterr().err
    with pytest.raises(GpuError):
        open_simulated(tmp_path / ("x" * 120))
    with pytest.raises(NotRunningError):
        open_simulated(tmp_path / "n", start=False)
    stop_simulated(tmp_path / "n")


def test_packets_carry_descriptors_close_on_exec() -> None:
    left, right = packets.pair()
    reader, writer = os.pipe()
    with left, right:
        packets.send(left, {"x": 1}, [writer])
        os.close(writer)
        message, (fd,) = packets.receive(right)
        assert message == {"x": 1}
        assert not os.get_inheritable(fd)
        os.write(fd, b"!")
        os.close(fd)
        assert os.read(reader, 2) == b"!"
        left.send(b"no object")
        assert packets.receive(right) == ({}, [])
        left.close()
        with pytest.raises(packets.Gone):
            packets.receive(right)
    os.close(reader)


def test_timers_run_in_order_and_may_set_others() -> None:
    timers, seen = Timers(), list[tuple[str, float]]()
    timers.after(2, lambda: seen.append(("late", timers.now)))
    timers.after(1, lambda: timers.after(0.5, lambda: seen.append(("nested", timers.now))))
    timers.run(1.2)
    assert (seen, timers.next_due) == ([], 1.5)
    timers.run(5)
    assert seen == [("nested", 1.5), ("late", 2.0)]
    assert (timers.now, timers.next_due) == (5, None)
