"""Lines that a shell evaluates: whatever a value holds, the variable gets exactly that."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpsd_client
from mpsd_client.env import named_gpu

PRINT = "import os, sys; sys.stdout.buffer.write(os.environb[b'V'])"
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=40)


@settings(max_examples=25, deadline=None)
@given(VALUES)
def test_sh_gets_the_very_value(value: str) -> None:
    script = "\n".join([*mpsd_client.export_lines({"V": value}), 'exec "$PYTHON" -c "$PRINT"'])
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        env={"PYTHON": sys.executable, "PRINT": PRINT},
        capture_output=True,
        check=True,
        timeout=20,
    )
    assert done.stdout.decode() == value


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("sh", "export V='a'\\''b!$(x)\\'"),
        ("csh", "setenv V 'a'\\''b\\!$(x)\\';"),
        ("fish", "set -gx V 'a\\'b!$(x)\\\\';"),
    ],
)
def test_each_shell_has_its_own_quoting(shell: str, line: str) -> None:
    assert mpsd_client.export_lines({"V": "a'b!$(x)\\"}, shell) == [line]


def test_names_and_values_that_no_shell_takes_are_refused() -> None:
    for environment in ({"A B": "x"}, {"": "x"}, {"1A": "x"}, {"A\n": "x"}, {"A": "\0"}):
        with pytest.raises(mpsd_client.UsageError):
            mpsd_client.export_lines(environment)
    with pytest.raises(mpsd_client.UsageError, match="sh, csh, fish"):
        mpsd_client.export_lines({}, "tcl")


@pytest.mark.parametrize(
    ("visible", "gpu"),
    [("3", "3"), (" GPU-1,GPU-2", "GPU-1"), ("2,0", "2"), ("", None), ("-1", None), ("MIG-7", None)],
)
def test_a_gpu_is_named_by_index_or_uuid(visible: str, gpu: str | None) -> None:
    assert named_gpu({"CUDA_VISIBLE_DEVICES": visible}) == gpu
    assert named_gpu({"CUDA_VISIBLE_DEVICES": visible}, "") == ""
    assert named_gpu({}) is None


@pytest.mark.parametrize(
    ("visible", "given", "gpu"),
    [
        (None, "GPU-3", "GPU-3"),
        (None, "GPU-3,GPU-4", "GPU-3"),
        (None, "all", None),
        (None, "0", None),
        ("0", "GPU-3", "GPU-3"),
        ("1", "GPU-3,GPU-4", "1"),
        ("GPU-4", "GPU-3,GPU-4", "GPU-4"),
        ("", "GPU-3", None),
    ],
)
def test_a_container_is_given_its_gpus_by_uuid(visible: str | None, given: str, gpu: str | None) -> None:
    environ = {"NVIDIA_VISIBLE_DEVICES": given} | (
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    )
    assert named_gpu(environ) == gpu
