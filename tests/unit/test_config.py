"""The configuration: defaults, files, environment, and the messages about mistakes."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path
from unittest.mock import patch

import pytest
from structlog.testing import capture_logs

from mpsd.base import debug
from mpsd.base.errors import ConfigError
from mpsd.base.model import Gpu
from mpsd.config import commands
from mpsd.config.basic import BASIC
from mpsd.config.reader import keys, load, to_toml, unknown_variables
from mpsd.config.schema import (
    BackendName,
    Config,
    DomainMode,
    GuardSetting,
    check_socket_path,
    default_directories,
)
from mpsd.daemon import cli
from mpsd.daemon.options import tell_indices, vault_limits

ROOT = Path(__file__).resolve().parents[2]
# Directories that the user of the tests may create.
PLACES = "\n".join(f"{name}_dir = '/tmp/no-{os.getpid()}/{name}'" for name in ("run", "log", "state"))
UNLIMITED = "protection: no setting limits it; mpsd-ctl doctor shows the level of this node\n"
ENVIRON = {"XDG_RUNTIME_DIR": "/run/user/1000", "HOME": "/home/someone"}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mpsd.toml"
    path.write_text(text)
    return path


def read(tmp_path: Path, text: str, **environ: str) -> Config:
    return load(write(tmp_path, text), {**ENVIRON, **environ})


def test_empty_file_gives_every_default(tmp_path: Path) -> None:
    config = read(tmp_path, "")
    assert config.backend is BackendName.NVIDIA
    assert config.domains.mode is DomainMode.PER_USER
    assert config.guard.heap is GuardSetting.AUTO
    assert config.limits.active_thread_percentage is None
    assert config.limits.clients == 48


def test_all_kinds_of_values(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        """
        schema_version = 1
        backend = "simulated"
        run_dir = "/run/x"
        [domains]
        mode = "shared"
        span = [["GPU-a", "GPU-b"], ["GPU-c"]]
        kill_victims_after_s = 3
        [limits]
        active_thread_percentage = 25
        client_priority = 1
        pinned_device_memory = { "0" = "1.5G", "GPU-11" = "512M" }
        [guard]
        low = true
        heap = false
        stack = "auto"
        """,
    )
    assert config.domains.span == (("GPU-a", "GPU-b"), ("GPU-c",))
    assert config.domains.kill_victims_after_s == 3.0
    assert dict(config.limits.pinned_device_memory) == {"0": "1.5G", "GPU-11": "512M"}
    assert (config.guard.low, config.guard.heap) == (GuardSetting.ON, GuardSetting.OFF)
    assert config.run_dir == "/run/x"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[domains]\nspair = true", "unknown key 'domains.spair' (did you mean 'domains.spare'?)"),
        ("spare = true", "unknown key 'spare' (did you mean 'domains.spare'?)"),
        ("[vault]\nfoo = 1", "unknown key 'vault.foo' (mpsd config show --all lists the keys)"),
        ("[domain]\nspare = true", "unknown key 'domain' (did you mean 'domains'?)"),
        ("nonsense = 1", "unknown key 'nonsense' (mpsd config show --all lists the keys)"),
        ("backend = 'nvidea'", "did you mean 'nvidia'?"),
        ("backend = 3", "is not one of nvidia, simulated"),
        ("domains = 3", "is a section"),
        ("[domains]\nspare = 'yes'", "domains.spare must be true or false"),
        ("[domains]\nspan = ['GPU-a']", "must be a list of lists"),
        ("[domains]\nspan = [['GPU-a'], ['GPU-a']]", "names 'GPU-a' twice"),
        ("[limits]\nactive_thread_percentage = 101", "out of range (use 0.01 to 100 %)"),
        ("[limits]\nactive_thread_percentage = nan", "out of range"),
        ("[limits]\nactive_thread_percentage = '50%'", "must be a number, not '50%'"),
        ("[limits]\nclients = 1.5", "must be a whole number"),
        ("[limits]\nclients = true", "must be a whole number"),
        ("[limits.pinned_device_memory]\n0 = '1T'", "is malformed"),
        ("[limits.pinned_device_memory]\n0 = '50%'", "is malformed"),
        ("[limits.pinned_device_memory]\n0 = '1.0001G'", "is not a whole number of MiB"),
        ("[limits.pinned_device_memory]\n0 = '0M'", "is not a whole number of MiB"),
        ("[limits.pinned_device_memory]\nfirst = '1G'", "names 'first', which is not a GPU"),
        ("[guard]\nlow = 'maybe'", "is not one of true, false, auto"),
        ('group = "a\\u001bb"', "control characters"),
        ("run_dir = 'relative'", "not an absolute path"),
        ("run_dir = '/" + "x" * 120 + "'", "choose a run_dir that is"),
        ("schema_version = 2", "newer than this mpsd"),
        ("[domains]\nstart_retry_s = 100", "start_retry_max_s is below"),
        ("a b", "is not TOML"),
        ("protect = guard", 'a text needs quotes: protect = "guard"'),
    ],
)
def test_mistakes_are_named_with_a_remedy(tmp_path: Path, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert wanted in str(caught.value)


def test_every_unknown_key_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mpsd\.toml: unknown key"):
        read(tmp_path, "x = 1")


def test_environment_wins_over_the_file(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        "[domains]\nspare = true\nmode = 'shared'",
        MPSD_DOMAINS_SPARE="false",
        MPSD_RUN_DIR="/run/other",
        MPSD_DOMAINS_MODE="per-user",
        MPSD_GUARD_LOW="true",
        MPSD_DOMAINS_SPAN='[["GPU-a"]]',
        MPSD_TEST_GPU="1",
    )
    assert config.domains.spare is False
    assert config.domains.mode is DomainMode.PER_USER
    assert config.guard.low is GuardSetting.ON
    assert config.domains.span == (("GPU-a",),)
    assert config.run_dir == "/run/other"


def test_bad_environment_value_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\$MPSD_LIMITS_CLIENTS"):
        read(tmp_path, "", MPSD_LIMITS_CLIENTS="many")


def test_a_rule_that_a_variable_breaks_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"with \$MPSD_RUN_DIR: run_dir = 'x' is not an absolute path"):
        read(tmp_path, "", MPSD_RUN_DIR="x")


def test_what_is_not_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "mpsd.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text"):
        load(path, ENVIRON)


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("mpsd config show", "mpsd"),
        ("mpsd.ctl faults --explain hang", "mpsd-ctl"),
        ("faultinject list", "mpsd-faultinject"),
    ],
)
def test_output_that_cannot_be_written_is_one_line_and_a_status(program: str, name: str) -> None:
    full = printing(f"{program} >/dev/full")
    assert (full.returncode, full.stderr) == (1, f"{name}: cannot write: No space left on device\n")
    closed = printing(f"{program} >&-")
    assert (closed.returncode, closed.stderr) == (0, "")


def printing(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        f"{shlex.quote(sys.executable)} -m {command}",
        shell=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "MPSD_CONFIG": "/dev/null"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration file"):
        load(tmp_path / "absent.toml", ENVIRON)
    with pytest.raises(ConfigError, match="no configuration file"):
        load(None, {**ENVIRON, "MPSD_CONFIG": str(tmp_path / "absent.toml")})


def test_what_has_no_end_or_is_below_a_file_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match="/dev/zero is larger than 1024 KiB"):
        load(Path("/dev/zero"), ENVIRON)
    with pytest.raises(ConfigError, match=r"a parent of /dev/null/mpsd\.toml is not a directory") as refused:
        load(Path("/dev/null/mpsd.toml"), ENVIRON)
    assert refused.value.remedy == "check the path"


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path, ENVIRON)


def test_directories_by_user() -> None:
    assert default_directories(0, {})["run_dir"] == "/run/mpsd"
    assert default_directories(1000, ENVIRON) == {
        "run_dir": "/run/user/1000/mpsd",
        "log_dir": "/home/someone/.local/state/mpsd/log",
        "state_dir": "/home/someone/.local/state/mpsd",
    }
    assert default_directories(1000, {})["run_dir"] == "/tmp/mpsd-1000"


def test_socket_paths_are_measured_in_bytes() -> None:
    assert check_socket_path("/" + "x" * 106)
    with pytest.raises(ConfigError, match="1 bytes shorter"):
        check_socket_path("/" + "x" * 107)
    with pytest.raises(ConfigError):
        check_socket_path("/" + "é" * 54)


def test_every_key_is_documented_and_reads_back(tmp_path: Path) -> None:
    config = read(tmp_path, "[domains]\nspan = [['GPU-a']]\n[limits.pinned_device_memory]\n0 = '1G'\n")
    text = to_toml(config, advanced=True)
    assert load(write(tmp_path, text), {}) == config
    for section, key, spec in keys():
        assert spec.metadata["doc"], f"{section}.{key}"
        assert key in text
    assert len(list(keys())) > len(fields(Config))


def test_advanced_keys_are_shown_if_asked_for_or_set(tmp_path: Path) -> None:
    assert {(section, key) for section, key, _ in keys()} >= BASIC
    config = read(tmp_path, "[domains]\nspare = false\n[store]\nmax_descriptors = 8192\n")
    text = to_toml(config)
    assert load(write(tmp_path, text), {}) == config
    shown = {line.split(" = ")[0] for line in text.splitlines() if " = " in line and line[0] != "#"}
    unset = {"active_thread_percentage", "client_priority"}
    assert shown == {key for _, key in BASIC} - unset | {"spare", "max_descriptors"}
    assert "[journal]" not in text and "[journal]" in to_toml(config, advanced=True)


def run_cli(*argv: str, environ: dict[str, str]) -> str:
    parser = ArgumentParser()
    commands.add_arguments(parser)
    out = io.StringIO()
    assert commands.run(parser.parse_args(argv), environ, out, out) == 0
    return out.getvalue()


def test_check_and_show(tmp_path: Path) -> None:
    path = str(write(tmp_path, f"backend = 'simulated'\n{PLACES}"))
    assert run_cli("check", path, environ=ENVIRON) == f"{path}: ok\n{UNLIMITED}"
    assert run_cli("check", environ={**ENVIRON, "MPSD_CONFIG": path}) == f"{path}: ok\n{UNLIMITED}"
    assert "[journal]" in run_cli("show", "--all", path, environ=ENVIRON)
    shown = run_cli("show", path, environ={**ENVIRON, "MPSD_LIMITS_CLIENTS": "7"})
    assert 'backend = "simulated"' in shown
    assert "clients = 7" in shown
    # A user may read and check a configuration that only root may run.
    everybodys = str(write(tmp_path, f"{PLACES}\n[domains]\nserve_default_path = true\n"))
    with patch("os.geteuid", return_value=1000):
        assert "serve_default_path = true" in run_cli("show", everybodys, environ=ENVIRON)


@pytest.mark.parametrize(
    ("text", "environ"),
    [
        ("", {"MPSD_LIMITS_CLIENTS": "many"}),
        ("run_dir = 'relative'", {}),
        ("", {"MPSD_RUN_DIR": "/tmp/" + "x" * 70}),
        ("", {"MPSD_RUN_DIR": "/dev/null/r"}),
        ("", {"MPSD_LOG_DIR": "/tmp"}),
        ("protect = 'most'", {}),
        ("[domains]\nspair = true", {}),
    ],
)
def test_check_and_run_refuse_with_the_same_words(
    tmp_path: Path, text: str, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = []
    for command in (["config", "check"], ["run", "--config"]):
        with pytest.MonkeyPatch.context() as patch:
            # Neither command gets as far as creating the directory.
            for name, value in {"MPSD_STATE_DIR": "/dev/null/s", **environ}.items():
                patch.setenv(name, value)
            assert cli.main([*command, str(write(tmp_path, text))]) == ConfigError.exit_code
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and told[0].startswith("mpsd: ")


def test_check_accepts_what_a_variable_mends(tmp_path: Path) -> None:
    path = str(write(tmp_path, f"{PLACES}\n[domains]\nstart_retry_s = 100\n"))
    mended = {**ENVIRON, "MPSD_DOMAINS_START_RETRY_MAX_S": "200"}
    assert run_cli("check", path, environ=mended) == f"{path}: ok\n{UNLIMITED}"


def test_check_names_wrong_variables_with_the_mistakes_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "x = 1")
    with pytest.raises(ConfigError, match=r"(?s)unknown key 'x'.*\$MPSD_LIMITS_CLIENTS") as refused:
        run_cli("check", str(path), environ={**ENVIRON, "MPSD_LIMITS_CLIENTS": "many"})
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("MPSD_DOMAIN_SPARE", "did you mean MPSD_DOMAINS_SPARE?"),
        ("MPSD_SOKET", "did you mean MPSD_SOCKET?"),
        ("MPSD_ZZZZZZ", "mpsd config show"),
        ("MPSD_ZONE_BYTES", "set MPSD_DEBUG=zone_bytes=VALUE instead"),
    ],
)
def test_check_tells_of_a_variable_that_means_nothing(tmp_path: Path, name: str, remedy: str) -> None:
    path = str(write(tmp_path, PLACES))
    told = run_cli("check", path, environ={**ENVIRON, name: "1"})
    assert told.startswith(f"mpsd: ignored the unknown variable {name} (")
    assert remedy in told and told.endswith(f"{path}: ok\n{UNLIMITED}")


def test_every_variable_that_something_here_reads_is_known() -> None:
    read = re.compile(r'"(MPSD_[A-Z_]*[A-Z])"')
    found = set()
    for folder, ending in (("mpsd", "py"), ("clients", "py"), ("faultinject", "py"), ("clients", "c")):
        for source in (ROOT / folder).rglob(f"*.{ending}"):
            found.update(read.findall(source.read_text()))
    assert {"MPSD_REAL_LIBCUDA", "MPSD_FAILOVER", "MPSD_LIBCUDA_DIR", "MPSD_ZONE_BYTES"} <= found
    assert not unknown_variables(dict.fromkeys(found - debug.RETIRED.keys(), "relay=off"))
    others = {"MPSD_SERVICE_HOST": "h", "MPSD_PORT": "tcp:"}
    assert not unknown_variables(others)


def test_main_reports_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "x = 1")
    assert commands.main(["check", str(path)]) == ConfigError.exit_code
    assert commands.main(["check", "--config", str(path)]) == ConfigError.exit_code
    assert capsys.readouterr().err.startswith("mpsd: ")


def test_check_names_every_mistake_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mpsd.toml"
    path.write_text('run_dirr = "x"\n[guard]\nlow = "maybe"\nlw = true\n[journal]\nmax_records = -5\n')
    assert commands.main(["check", str(path)]) == ConfigError.exit_code
    told = capsys.readouterr().err
    for part in ("'run_dir'?", "guard.low = 'maybe'", "'guard.lw'", "max_records = -5"):
        assert part in told


def test_a_mistake_is_blamed_on_what_the_user_has_given(tmp_path: Path) -> None:
    path, far = tmp_path / "mpsd.toml", tmp_path / ("x" * 120)
    path.write_text(f"run_dir = '{far}'\n")
    for environ, blamed in ({}, "--backend"), ({"MPSD_BACKEND": "nvidia"}, "--backend"):
        with pytest.raises(ConfigError) as refused:
            load(path, environ, backend="simulated")
        assert f"{path} with {blamed}" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        load(path, {"MPSD_BACKEND": "simulated"})
    assert f"{path} with $MPSD_BACKEND" in str(refused.value)


def test_the_simulated_gpu_has_a_directory_of_its_own(tmp_path: Path) -> None:
    # pytest's own temporary paths are too long for sockets.
    with tempfile.TemporaryDirectory(prefix="mpsd-", dir="/tmp") as base:
        text, same = f"run_dir = '{base}/one'", f"{base}/link/one/"
        Path(base, "link").symlink_to(base)
        with pytest.raises(ConfigError, match="is run_dir too") as refused:
            read(tmp_path, f"backend = 'simulated'\n{text}\n[simulated]\ndir = '{same}'")
        assert same in str(refused.value) and "dir" in refused.value.remedy
        with pytest.raises(ConfigError, match="is run_dir too"):
            read(tmp_path, f"backend = 'simulated'\n{text}", MPSD_SIM_DIR=same)
        assert read(tmp_path, f"{text}\n[simulated]\ndir = '{same}'").backend is BackendName.NVIDIA
    with pytest.raises(ConfigError, match=r"choose a \[simulated\] dir that is \d+ bytes shorter"):
        read(tmp_path, f"backend = 'simulated'\n[simulated]\ndir = '/{'x' * 100}'")


@pytest.mark.parametrize("line", ['mode = "some"', "per_minute = 0", 'driver = "libcuda.so.1"', "modes = 1"])
def test_mistakes_in_fail_over_are_named(tmp_path: Path, line: str) -> None:
    text = f"[failover]\n{line}\n"
    with pytest.raises(ConfigError, match=f"failover.{line.split()[0]}"):
        read(tmp_path, text)


def test_the_vault_leaves_room_for_leases(tmp_path: Path) -> None:
    text = "protect = '{}'\n[vault]\ndescriptors = 600\n[store]\nmax_descriptors = 1000\n"
    for level in ("auto", "guard"):
        with pytest.raises(ConfigError, match="more than half"):
            read(tmp_path, text.format(level))
    assert read(tmp_path, text.format("observe")).vault.descriptors == 600


def test_the_default_of_the_vault_leaves_half_of_a_smaller_store(tmp_path: Path) -> None:
    small = read(tmp_path, "[store]\nmax_descriptors = 2048\n")
    assert vault_limits(small).descriptors == 1024
    assert vault_limits(read(tmp_path, "")).descriptors == Config().vault.descriptors
    chosen = "[vault]\ndescriptors = 300\n[store]\nmax_descriptors = 2048\n"
    assert vault_limits(read(tmp_path, chosen)).descriptors == 300


def test_an_index_in_a_memory_limit_is_told_where_it_could_mean_another_gpu(tmp_path: Path) -> None:
    both = [Gpu(index, f"GPU-{index}", "", "", 1) for index in range(2)]
    by_index = read(tmp_path, "[limits.pinned_device_memory]\n0 = '1G'\nGPU-1 = '2G'\n")
    by_uuid = read(tmp_path, "[limits.pinned_device_memory]\nGPU-1 = '2G'\n")
    with capture_logs() as logged:
        tell_indices(by_uuid, both)
        tell_indices(by_index, both[:1])
        assert logged == []
        tell_indices(by_index, both)
    (line,) = logged
    assert (line["log_level"], line["indices"]) == ("warning", ["0"]) and line["remedy"]
