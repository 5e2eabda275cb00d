"""mpsd-run: the environment of a program and its children, and when the program is not started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpsd_client
from mpsd_client.driver import find_driver
from tests.support import libcudas
from tests.support.libcudas import DEADLINE_S, ROOT, Libraries, run
from tests.support.site import Site

MPSD_RUN = [*libcudas.MPSD_RUN, "-q"]

# Print for this process and each kind of child whether it reaches the driver through the proxy.
CHILDREN = """
import ctypes, json, multiprocessing, os, subprocess, sys
sys.path.insert(0, {libcuda!r})
from mpsd_libcuda.stats import read_stats
def look(queue=None):
    code = ctypes.CDLL("libcuda.so.1").cuInit(0)
    answer = [code, read_stats(os.getpid()).state.name, os.environ.get("CUDA_MPS_PIPE_DIRECTORY")]
    if queue is not None:
        queue.put(answer)
    return answer
def main():
    if sys.argv[1:]:
        print(json.dumps(look()))
        return
    found = {{}}
    for kind in ("fork", "spawn"):
        context = multiprocessing.get_context(kind)
        queue = context.SimpleQueue()
        child = context.Process(target=look, args=(queue,))
        child.start()
        found[kind] = queue.get()
        child.join()
    launched = subprocess.run(["sh", "-c", 'exec "$0" "$1" again', sys.executable, __file__],
                              stdout=subprocess.PIPE, check=True)
    found["launcher"] = json.loads(launched.stdout)
    found["self"] = look()
    print(json.dumps(found))
if __name__ == "__main__":
    main()
""".format(libcuda=str(ROOT / "clients" / "libcuda"))


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with Site(protect='"guard"') as started:
        yield started.start()


@pytest.fixture
def environment(site: Site, libraries: Libraries) -> dict[str, str]:
    """Return a user's environment on a healthy node; the driver is the stand-in."""
    environment = libraries.environment(proxied=False)
    return {
        **environment,
        "PYTHONPATH": str(ROOT / "clients") + os.pathsep + str(ROOT),
        "MPSD_SOCKET": site.socket,
        "MPSD_LIBCUDA_DIR": str(libraries.proxy),
        "LD_LIBRARY_PATH": f"/nonexistent/first::{libraries.standin}",
    }


@pytest.fixture
def pipe_directory(site: Site) -> str:
    with mpsd_client.connect(site.socket) as daemon:
        return daemon.env()["CUDA_MPS_PIPE_DIRECTORY"]


def test_the_program_gets_variables_and_keeps_the_others(
    environment: dict[str, str], libraries: Libraries, pipe_directory: str, site: Site
) -> None:
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    done = run([*MPSD_RUN, *show], {**environment, "MINE": "a b"})
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(done.stdout)
    added = {
        "CUDA_MPS_PIPE_DIRECTORY": pipe_directory,
        "LD_LIBRARY_PATH": f"{libraries.proxy}:/nonexistent/first::{libraries.standin}",
        "MPSD_REAL_LIBCUDA": str(libraries.real),
        "MPSD_VAULT_SOCKET": str(site.run_dir / "vault.sock"),
        "MPSD_PROTECTION": "guard",
        "MINE": "a b",
    }
    assert {name: value for name, value in seen.items() if name != "LC_CTYPE"} == {**environment, **added}
    verbose = run([*MPSD_RUN, "-v", "true"], environment)
    assert verbose.returncode == 0
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH", "MPSD_REAL_LIBCUDA"):
        assert f"mpsd-run: {name}={added[name]}" in verbose.stderr.splitlines()


def test_children_of_every_kind_have_the_proxy(
    environment: dict[str, str], pipe_directory: str, tmp_path: Path
) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done = run([*MPSD_RUN, sys.executable, script], environment)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [0, "ACTIVE", pipe_directory]
    assert json.loads(done.stdout) == dict.fromkeys(("fork", "spawn", "launcher", "self"), expected)


@pytest.mark.parametrize("direct", [False, True], ids=["dlopen", "linked"])
def test_a_c_program_runs_the_same(environment: dict[str, str], libraries: Libraries, direct: bool) -> None:
    program = libraries.program("sequence", direct=direct)
    without = run([program], libraries.environment(proxied=False))
    # Memory of the vault answers some queries differently.
    done = run([*MPSD_RUN, program], {**environment, "MPSD_DEBUG": "vault=0"})
    assert (done.returncode, done.stderr, done.stdout) == (0, "", without.stdout)


def test_a_program_that_opens_the_driver_by_its_path_runs_without_the_proxy(
    environment: dict[str, str], libraries: Libraries
) -> None:
    program = libraries.program("sequence")
    without = run([program], libraries.environment(proxied=False))
    done = run([*MPSD_RUN, program, "dlsym", libraries.real], environment)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", without.stdout)


def test_running_it_twice_is_running_it_once(environment: dict[str, str], libraries: Libraries) -> None:
    show = ["sh", "-c", "echo $LD_LIBRARY_PATH $MPSD_REAL_LIBCUDA"]
    done = run([*MPSD_RUN, *MPSD_RUN, *show], environment)
    assert done.stderr == ""
    assert done.stdout.split() == [
        f"{libraries.proxy}:/nonexistent/first::{libraries.standin}",
        str(libraries.real),
    ]


def test_it_can_be_had_as_lines_for_a_shell(environment: dict[str, str], tmp_path: Path) -> None:
    lines = run([*MPSD_RUN, "--env"], environment).stdout
    script = f'eval "$1"; {sys.executable} {tmp_path / "children.py"} again'
    (tmp_path / "children.py").write_text(CHILDREN)
    done = run(["sh", "-c", script, "sh", lines], environment)
    assert json.loads(done.stdout)[:2] == [0, "ACTIVE"]


@pytest.mark.parametrize(
    "program, status",
    [
        (["sh", "-c", "exit 7"], 7),
        (["--", "sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -TERM $$"], -signal.SIGTERM),
        (["sh", "-c", "kill -PIPE $$"], -signal.SIGPIPE),
        (["/nonexistent/program"], 127),
        (["/etc/passwd"], 126),
        ([], 2),
    ],
)
def test_the_end_of_the_program_is_the_end(
    environment: dict[str, str], program: list[str], status: int
) -> None:
    done = run([*MPSD_RUN, *program], environment)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == (status in (2, 126, 127))


def test_the_process_becomes_the_program(environment: dict[str, str]) -> None:
    """mpsd-run is replaced by the program, which gets signals and the terminal directly."""
    waiting = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    with subprocess.Popen(
        [*MPSD_RUN, sys.executable, "-c", waiting], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) == process.pid
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == -signal.SIGTERM
        finally:
            process.kill()


SHOW = ["sh", "-c", "echo [$CUDA_MPS_PIPE_DIRECTORY] [$LD_LIBRARY_PATH] [$MPSD_REAL_LIBCUDA]"]


def test_without_a_daemon_the_program_runs_only_if_that_is_allowed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    environment["MPSD_SOCKET"] = str(tmp_path / "none.sock")
    done = run([*MPSD_RUN, *SHOW], environment)
    assert (done.returncode, done.stdout) == (69, "") and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"mpsd-run: no daemon answers on {tmp_path}/none.sock")
    loud = run([*libcudas.MPSD_RUN, "--allow-unprotected", *SHOW], environment)
    assert loud.stdout.split() == ["[]", f"[{environment['LD_LIBRARY_PATH']}]", "[]"]
    assert len(loud.stderr.splitlines()) == 1
    assert loud.stderr.startswith("mpsd: not protected: no daemon answers on ")


WISHES = [
    (["--gpu", "7"], "there is no GPU '7' (GPUs of this machine: 0: GPU-"),
    (["--gpu", ""], "argument 'gpu'"),
    (["--library", "/nonexistent"], "no libcuda.so.1 in /nonexistent"),
    (["--socket", "/nonexistent.sock"], "no daemon answers on /nonexistent.sock"),
]


@pytest.mark.parametrize("wish, words", WISHES)
def test_a_request_that_cannot_be_met_keeps_the_program_from_running(
    environment: dict[str, str], wish: list[str], words: str
) -> None:
    done = run([*MPSD_RUN, *wish, "echo", "ran"], environment)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith(f"mpsd-run: {words}") and len(done.stderr.splitlines()) == 1
    done = run(["sh", "-c", 'eval "$("$@")" || echo noticed', "sh", *MPSD_RUN, *wish, "--env"], environment)
    assert (done.returncode, done.stdout) == (0, "noticed\n")


@pytest.mark.parametrize("wish", [["--gpu", "0", "echo", "ran"], ["--env"], ["--env", "csh"]])
def test_without_a_daemon_a_wish_is_an_error(
    environment: dict[str, str], tmp_path: Path, wish: list[str]
) -> None:
    environment["MPSD_SOCKET"] = str(tmp_path / "none.sock")
    done = run([*MPSD_RUN, *wish], environment)
    assert (done.returncode, done.stdout) == (69, "false\n" if wish[0] == "--env" else "")
    assert done.stderr.startswith(f"mpsd-run: no daemon answers on {tmp_path}/none.sock")
    assert len(done.stderr.splitlines()) == 1


def test_lines_for_a_shell_that_nobody_can_read_are_an_error(environment: dict[str, str]) -> None:
    done = run(["sh", "-c", 'exec "$@" >/dev/full', "sh", *MPSD_RUN, "--env"], environment)
    assert (done.returncode, done.stderr) == (
        69,
        "mpsd-run: cannot write to standard output: No space left on device\n",
    )


def test_without_the_library_or_a_driver_the_program_joins_all_the_same(
    environment: dict[str, str], libraries: Libraries, pipe_directory: str, tmp_path: Path
) -> None:
    path, loud = environment["LD_LIBRARY_PATH"], libcudas.MPSD_RUN
    done = run([*loud, *SHOW], {**environment, "MPSD_LIBCUDA_DIR": str(tmp_path)})
    assert done.stdout.split() == [f"[{pipe_directory}]", f"[{path}]", "[]"]
    assert (
        f"no libcuda.so.1 in MPSD_LIBCUDA_DIR={tmp_path}" in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    if find_driver({}, str(libraries.proxy)) is not None:
        return
    environment["LD_LIBRARY_PATH"] = str(tmp_path)
    done = run([*loud, *SHOW], environment)
    assert done.stdout.split() == [f"[{pipe_directory}]", f"[{tmp_path}]", "[]"]
    assert "no CUDA driver" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("streams", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-", "2>/dev/full", ">/dev/full"])
@pytest.mark.parametrize("daemon", [True, False], ids=["daemon", "no daemon"])
def test_streams_that_are_closed_or_full_do_not_keep_the_program_from_running(
    environment: dict[str, str], tmp_path: Path, streams: str, daemon: bool
) -> None:
    if not daemon:
        environment["MPSD_SOCKET"] = str(tmp_path / "none.sock")
    program = ["sh", "-c", 'ls -l /proc/$$/fd >"$0"; exit 7', tmp_path / "ran"]
    command = [*libcudas.MPSD_RUN, "-v", "--allow-unprotected", *program]
    done = run(["sh", "-c", f'exec "$@" {streams}', "sh", *command], environment)
    assert (done.returncode, done.stdout) == (7, "")
    assert "socket:" not in (tmp_path / "ran").read_text()


@pytest.mark.parametrize("program, status", [(["sh", "-c", "exit 7"], 7), (["/nonexistent/program"], 127)])
def test_a_stderr_that_nobody_reads_does_not_keep_the_program_from_running(
    environment: dict[str, str], program: list[str], status: int
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [*MPSD_RUN, "-v", *program]
        done = subprocess.run(command, env=environment, stderr=writer, timeout=DEADLINE_S, check=False)
    finally:
        os.close(writer)
    assert done.returncode == status


def test_an_answer_that_it_does_not_expect_keeps_the_program_from_running(
    environment: dict[str, str],
) -> None:
    script = (
        "import sys; from mpsd_client import client, run; client.Client.call = lambda *_, **__: {}; "
        "sys.exit(run.main(sys.argv[1:]))"
    )
    done = run([sys.executable, "-c", script, *SHOW], environment)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("mpsd-run: KeyError: 'gpus'; ") and len(done.stderr.splitlines()) == 1
    done = run([sys.executable, "-c", script, "--allow-unprotected", *SHOW], environment)
    assert done.stdout.split() == ["[]", f"[{environment['LD_LIBRARY_PATH']}]", "[]"]
    assert done.stderr.startswith("mpsd: not protected: KeyError: 'gpus'; the program runs outside mpsd")


@pytest.mark.parametrize("given", [[], ["LC_CTYPE=C"], ["LC_CTYPE=C.UTF-8"], ["LC_ALL=C"], ["LANG=C"]])
def test_the_program_has_the_locale_that_it_was_given(
    environment: dict[str, str], tmp_path: Path, given: list[str]
) -> None:
    """The program gets the locale unchanged, although Python turns C into C.UTF-8 for itself and its
    children."""
    kept = [f"PYTHONPATH={environment['PYTHONPATH']}", f"MPSD_SOCKET={tmp_path / 'none.sock'}", *given]
    done = run(["env", "-i", *kept, *MPSD_RUN, "--allow-unprotected", "/usr/bin/env"], environment)
    assert sorted(done.stdout.splitlines()) == sorted(kept)


@pytest.mark.parametrize("by_path", [True, False], ids=["path", "PATH"])
def test_a_script_that_names_no_interpreter_is_the_shells(
    environment: dict[str, str], tmp_path: Path, pipe_directory: str, by_path: bool
) -> None:
    script = tmp_path / "mine"
    script.write_text('echo "$0" "$@" "$CUDA_MPS_PIPE_DIRECTORY"; exit 7\n')
    script.chmod(0o755)
    environment["PATH"] = f"/nonexistent:{tmp_path}:{environment['PATH']}"
    done = run([*MPSD_RUN, script if by_path else "mine", "a", "b c"], environment)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"{script} a b c {pipe_directory}\n"


def test_a_program_on_the_path_that_may_not_be_executed_is_passed_over(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "true").write_text("")
    (tmp_path / "mine").write_text("")
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    assert run([*MPSD_RUN, "true"], environment).returncode == 0
    assert run([*MPSD_RUN, "mine"], environment).returncode == 126
    assert run([*MPSD_RUN, "none-of-this-name"], environment).returncode == 127
    assert run([*MPSD_RUN, ""], environment).returncode == 127
