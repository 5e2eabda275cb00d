"""mpsd-run and `eval "$(mpsd-ctl env)"`: the same environment, one line on protection, refusals with 69."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mpsd_client.joining.plan import FAILOVER, LEVEL, PATH, PIPE, REAL, VAULT, make_plan
from tests.support.site import DEADLINE_S, Site

MPSD_RUN = [sys.executable, "-m", "mpsd_client.run"]
MPSD_CTL = [sys.executable, "-m", "mpsd.ctl"]
SETTINGS = {"simulated__gpus": "2", "protect": '"failover"', "failover__driver": '"/bin/true"'}
FULL = "mpsd: protected (guard + failover), GPU 0, domain d"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(**SETTINGS) as started:
        yield started.start()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1: the programs of these tests load none."""
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "libcuda.so.1").touch()
    return folder


@pytest.fixture
def environ(site: Site, library: Path) -> dict[str, str]:
    named = {"MPSD_SOCKET": site.socket, "MPSD_LIBCUDA_DIR": str(library), REAL: "/bin/true"}
    return site.environ() | named | {PATH: "/nonexistent/mine"}


def run(command: list[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def by_run(options: list[str], environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    done = run([*MPSD_RUN, *options, "env", "-0"], environ)
    return variables(done), done.stderr


def by_eval(options: list[str], environ: Mapping[str, str]) -> tuple[dict[str, str], str]:
    script = 'out=$("$@") && eval "$out" && exec env -0'
    done = run(["sh", "-c", script, "sh", *MPSD_CTL, "env", *options], environ)
    return variables(done), done.stderr


def variables(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    assert done.returncode == 0, done.stderr
    rows = dict(row.split("=", 1) for row in done.stdout.split("\0") if row)
    # The shell and env(1) set these themselves.
    return {name: value for name, value in rows.items() if name not in ("_", "PWD", "OLDPWD", "SHLVL", "OUT")}


CASES: list[tuple[list[str], dict[str, str]]] = [
    ([], {}),
    (["--protect", "failover"], {}),
    (["--protect", "guard"], {}),
    (["--protect", "observe"], {}),
    (["--require", "failover"], {}),
    (["--gpu", "1"], {}),
    ([], {"CUDA_VISIBLE_DEVICES": "1"}),
    ([], {"CUDA_VISIBLE_DEVICES": "1,0"}),
    (["--gpu", "0"], {"CUDA_VISIBLE_DEVICES": "1"}),
    ([], {"CUDA_VISIBLE_DEVICES": ""}),
    ([], {"NVIDIA_VISIBLE_DEVICES": "1"}),
    ([], {"NVIDIA_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}),
    ([], {"NVIDIA_VISIBLE_DEVICES": "none"}),
    ([], {"MPSD_LIBCUDA_DIR": "/nonexistent"}),
]


@pytest.mark.parametrize(
    "options, extra", CASES, ids=[" ".join([*o, *map(str, e.items())]) for o, e in CASES]
)
def test_eval_gives_a_program_the_same_environment(
    environ: dict[str, str], options: list[str], extra: dict[str, str]
) -> None:
    given = environ | extra
    ran, line = by_run(options, given)
    assert (ran, line.replace("mpsd-run:", "mpsd-ctl:")) == by_eval(options, given)
    assert line.startswith("mpsd: ")
    # A second mpsd-run inside the first one changes nothing.
    assert by_run(options, ran)[0] == ran


def test_the_line_and_the_variables_follow_the_level(
    site: Site, environ: dict[str, str], library: Path
) -> None:
    full, line = by_run([], environ)
    assert line.startswith(FULL) and len(line.splitlines()) == 1
    assert full[PATH] == f"{library}:/nonexistent/mine" and full[LEVEL] == "failover"
    assert (full[VAULT], full[FAILOVER]) == (f"{site.run_dir}/vault.sock", f"{site.run_dir}/failover.sock")
    guard, line = by_run(["--protect", "guard"], environ)
    assert line.startswith("mpsd: protected (guard; no fail-over: --protect guard), GPU 0, domain d")
    assert {name: guard.get(name) for name in full} == full | {LEVEL: "guard", FAILOVER: None}
    observe, line = by_run(["--protect", "observe"], environ)
    assert line.startswith(
        "mpsd: not protected from faults of other programs (observe: --protect observe), GPU 0, domain d"
    )
    assert {*full} - {*observe} == {VAULT, FAILOVER, REAL} - {*environ} and observe[
        PATH
    ] == "/nonexistent/mine"
    assert by_run(["--protect", "observe"], full)[0] == observe, (
        "also inside an environment of a higher level"
    )
    assert by_run(["-q"], environ) == (full, "")


def test_what_is_missing_is_named_with_its_remedy(site: Site, environ: dict[str, str]) -> None:
    _, line = by_run([], environ | {"MPSD_LIBCUDA_DIR": "/nonexistent"})
    why = "(observe: no libcuda.so.1 in MPSD_LIBCUDA_DIR=/nonexistent), GPU 0, domain d"
    assert why in line and line.rstrip().endswith("; name the folder of mpsd's library")
    plain = {"protect": '"observe"'}
    with Site(**plain) as other:
        given = environ | {"MPSD_SOCKET": other.start().socket}
        assert "not protected from faults of other programs (observe: " in by_run([], given)[1]
        other.kill()
        other.write_config(protect='"guard"')
        other.start()
        assert "protected (guard; no fail-over: " in by_run([], given)[1]
        done = run([*MPSD_RUN, "--require", "failover", "echo", "ran"], given)
        assert (done.returncode, done.stdout) == (69, "")
        assert done.stderr.startswith("mpsd-run: --require failover: the program would have guard: ")
        done = run([*MPSD_RUN, "--protect", "failover", "echo", "ran"], given)
        assert (done.returncode, done.stdout) == (69, "")
        assert done.stderr.startswith("mpsd-run: --protect failover: the level offered is guard: ")
        assert run([*MPSD_RUN, "-q", "--require", "guard", "echo", "ran"], given).stdout == "ran\n"


def refused(environ: Mapping[str, str], words: str) -> None:
    """Check that both commands refuse with the remedy, and that --allow-unprotected runs the program."""
    done = run([*MPSD_RUN, "echo", "ran"], environ)
    assert (done.returncode, done.stdout) == (69, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mpsd-run: {words}")
    assert line.endswith("; echo was not started (--allow-unprotected starts it outside mpsd)")
    done = run(["sh", "-c", 'eval "$("$@")" || echo noticed', "sh", *MPSD_CTL, "env"], environ)
    assert done.stdout == "noticed\n" and words in done.stderr
    done = run([*MPSD_RUN, "--allow-unprotected", "sh", "-c", f"echo [${PIPE}]"], environ)
    assert (done.returncode, done.stdout) == (0, f"[{environ.get(PIPE, '')}]\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"mpsd: not protected: {words}")
    assert line.endswith("; the program runs outside mpsd (--allow-unprotected)")
    done = run([*MPSD_RUN, "--require", "observe", "--allow-unprotected", "echo", "ran"], environ)
    assert (done.returncode, done.stdout) == (2, "")


def test_a_drained_gpu_a_missing_daemon_and_a_closed_path_refuse(
    environ: dict[str, str], tmp_path: Path
) -> None:
    refused(environ | {"MPSD_SOCKET": str(tmp_path / "none.sock")}, "no daemon answers on ")
    assert run([*MPSD_CTL, "env"], environ | {"MPSD_SOCKET": "/nonexistent.sock"}).returncode == 3
    with Site() as site:
        given = environ | {"MPSD_SOCKET": site.start().socket}
        site.ask(lambda client: client.drain())
        refused(given, "GPU-")
        site.ask(lambda client: client.undrain())
        done = run([*MPSD_RUN, "-q", "echo", "ran"], given)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")


def test_a_start_while_mpsd_restarts_waits_for_it() -> None:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    with Site() as site, ThreadPoolExecutor() as pool:
        path = site.start().socket
        site.kill()
        start = pool.submit(make_plan, {}, socket_path=path, wait_s=DEADLINE_S, tell=lines.put)
        line = lines.get(timeout=DEADLINE_S)
        assert line.startswith(f"no daemon answers on {path}: waiting up to ")
        site.start()
        assert start.result(DEADLINE_S).variables[PIPE].startswith(str(site.run_dir)) and lines.empty()


def test_a_program_outside_mpsd_sees_the_gpu_that_it_named(site: Site, environ: dict[str, str]) -> None:
    inside, _ = by_run([], environ | {"CUDA_VISIBLE_DEVICES": "1"})
    uuid = site.status()["gpus"][1]["uuid"]
    assert (inside["CUDA_VISIBLE_DEVICES"], inside["MPSD_DEVICE_NUMBERS"]) == ("0", uuid)
    lost = inside | {"MPSD_SOCKET": "/nonexistent.sock"}
    outside, _ = by_run(["--allow-unprotected"], lost)
    assert outside["CUDA_VISIBLE_DEVICES"] == uuid and outside[PATH] == "/nonexistent/mine"
    assert not {PIPE, VAULT, FAILOVER, LEVEL, "MPSD_DEVICE_NUMBERS"} & {*outside}, "it would join after all"
    outside, _ = by_run(["--allow-unprotected", "--gpu", "1"], environ | {"MPSD_SOCKET": "/nonexistent.sock"})
    assert (outside["CUDA_VISIBLE_DEVICES"], outside["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("CUDA_VISIBLE_DEVICES", "", "empty"),
        ("CUDA_VISIBLE_DEVICES", "-1", "-1"),
        ("NVIDIA_VISIBLE_DEVICES", "none", "none"),
    ],
)
def test_a_program_that_sees_no_gpu_needs_no_daemon(
    environ: dict[str, str], name: str, value: str, shown: str
) -> None:
    outer, _ = by_run([], environ)
    outer.pop("CUDA_VISIBLE_DEVICES", None)
    for given in (environ, outer):
        ran, line = by_run([], given | {"MPSD_SOCKET": "/nonexistent.sock", name: value})
        assert line == f"mpsd: no GPU is visible ({name} is {shown}): the program runs without mpsd\n"
        assert ran["CUDA_VISIBLE_DEVICES"] == (value if name == "CUDA_VISIBLE_DEVICES" else "")
        assert not {PIPE, VAULT, FAILOVER, LEVEL} & {*ran} and ran[PATH] == "/nonexistent/mine"
    hidden = environ | {name: value}
    done = run([*MPSD_RUN, "--require", "observe", "echo", "ran"], hidden)
    assert (done.returncode, done.stdout) == (69, "")
    assert f"--require observe: no GPU is visible ({name} is {shown}) (name a GPU in " in done.stderr
    assert run([*MPSD_RUN, "-q", "sh", "-c", "exit 7"], hidden).returncode == 7
    # The command line takes precedence.
    assert PIPE in by_run(["--gpu", "0"], hidden)[0]


def test_a_program_that_sees_no_gpu_starts_no_domain() -> None:
    with Site() as site:
        given = site.environ() | {"MPSD_SOCKET": site.start().socket, "CUDA_VISIBLE_DEVICES": ""}
        before = [domain["id"] for domain in site.status()["domains"]]
        site.ask(lambda client: client.drain())
        assert run([*MPSD_RUN, "-q", "echo", "ran"], given).stdout == "ran\n"
        assert [domain["id"] for domain in site.status()["domains"]] == before


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full"])
def test_a_closed_or_full_stderr_spoils_no_environment(environ: dict[str, str], streams: str) -> None:
    done = run(["sh", "-c", f'"$@" {streams}', "sh", *MPSD_CTL, "env"], environ)
    assert done.returncode == 0
    assert {line.split(" ", 1)[0] for line in done.stdout.splitlines()} == {"export"}


@pytest.mark.parametrize("options", [["--protect", "guard", "--require", "failover"], ["--protect", "best"]])
def test_levels_that_contradict_are_errors_of_the_command_line(
    environ: dict[str, str], options: list[str]
) -> None:
    for command in ([*MPSD_RUN, *options, "echo", "ran"], [*MPSD_CTL, "env", *options]):
        done = run(command, environ)
        assert done.returncode == 2 and "ran" not in done.stdout
