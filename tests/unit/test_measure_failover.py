"""Driver instances that do not affect each other, and the arithmetic of the fail-over findings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faultinject.campaigns.measure.failover import findings
from faultinject.programs.devices import driverfile

DRIVER = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

const char *pipe_directory(void) { return getenv("CUDA_MPS_PIPE_DIRECTORY"); }
const char *trusted_directory(void) { return secure_getenv("CUDA_MPS_PIPE_DIRECTORY"); }
int own_socket(const char *name)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	strcpy(address.sun_path + 1, name);
	return bind(socket(AF_UNIX, SOCK_DGRAM, 0), (void *)&address, 3 + strlen(name));
}
"""

# Loads the driver, then an instance created in the way of argv[2]; prints what the instance found.
PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from faultinject.programs.devices import driverfile as copies

folder, how, name = Path(sys.argv[1]), sys.argv[2], f"cuda-uvmfd-1-{os.getpid()}".encode()
source, target = folder / "libdriver.so", folder / f"copy-{how}.so"
helper = copies.Helper(copies.build_helper(source, folder / f"helper-{how}.so"))
first = ctypes.CDLL(str(source))
assert first.own_socket(name) == 0
(copies.copy_renamed if how == "symbols" else copies.copy_plain)(source, target)
copy = ctypes.CDLL(str(target))
if how == "slots":
    copies.overwrite_slots(copy, target, helper)
for library in (first, copy):
    library.pipe_directory.restype = library.trusted_directory.restype = ctypes.c_char_p
found = helper.within(
    Path("/standby"), 1, lambda: (copy.own_socket(name), copy.pipe_directory(), copy.trusted_directory())
)
print(found, first.pipe_directory(), first.own_socket(name))
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    options = ["-shared", "-fPIC", "-Wl,-z,now", "-Wl,-soname,libdriver.so.1"]
    subprocess.run(["gcc", *options, "-o", folder / "libdriver.so", folder / "driver.c"], check=True)
    return folder


@pytest.mark.parametrize("how", ["slots", "symbols"])
def test_a_copy_has_a_socket_and_an_environment_of_its_own(driver: Path, how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(driver), how], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "(0, b'/standby', b'/standby') None -1"


def test_an_unchanged_copy_has_neither(driver: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(driver), "nothing"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "(-1, None, None) None -1"


def test_what_a_library_tells(driver: Path) -> None:
    told = driverfile.describe(driver / "libdriver.so")
    assert told["soname"] == "libdriver.so.1"
    assert told["binds now"]
    assert sorted(slot[0] for slot in told["slots"]) == ["bind", "getenv", "secure_getenv"]
    with pytest.raises(ValueError, match="not a 64-bit"):
        driverfile.Elf(b"#!/bin/sh\n")


def fault(kind: str, written: float, error: float, *, means: str = "none") -> dict[str, Any]:
    words = {name: [written, None, None] for name in ("long kernel", "queued kernels", "copies")}
    writer = {
        "means": "none", "words": words, "signs": {"query": [error, 719]}, "ended": {}, "read code": 0,
    }  # fmt: skip
    return {
        "kind": kind, "means": means, "trigger": ["nvml xid", 20.0], "writers": [writer],
        "uvm": [], "offender": [[19.0, "sync ok"], [90.0, "error 719"]], "xids": [[20.0, 43]],
        "server status": [[30.0, "FAULT"]], "kernel log": [[20.0, "NVRM: Xid 43, pid=SERVER"]],
        "server log": [], "ps": [], "nvml MPS processes": [], "nvml utilisation": 0,
        "bystander longest": 21.0,
        "loop": {
            "successes": 100, "in memory": 100, "wrong reads": 0, "end": [error, 719, "cuCtxSynchronize"],
            "first kernel": [20.2, 0],
        },
    }  # fmt: skip


def test_a_write_after_a_sign_makes_it_no_fence() -> None:
    faults = [fault("trap", 60.0, 98.0), fault("misaligned", 25.0, 41.0)]
    by = {line["sign"]: line for line in findings.fences(faults)}
    assert by["own error: query"]["written after it"] == 0
    assert by["own error: query"]["least ms between"] == 16.0
    assert by["nvml xid 43"]["written after it"] == 2
    assert by["nvml xid 43"]["worst ms written after it"] == 40.0
    assert by["server in FAULT"]["kinds written after it"] == ["trap"]


def test_a_sync_that_memory_does_not_bear_out_is_counted() -> None:
    lying = fault("trap", 60.0, 98.0)
    lying["loop"]["in memory"] = 99
    rows = [{"case": "faults", **row} for row in (lying, fault("trap", 60.0, 98.0))]
    made = findings.failover([*rows, {"case": "faults", "what": "took", "seconds": 4.0}])
    (found,) = [row for row in made if "falsely" in row["question"]]
    assert found["finding"].startswith("1 of 200 successful synchronisations in 2 faults")


def test_a_context_that_was_cut_off_is_judged_by_when_that_was_known() -> None:
    cut, kept = fault("store", 3.0, 98.0, means="cut"), fault("pbdma", 9.0, 98.0, means="cut")
    for one, ended, freed in ((cut, 4.0, 4.5), (kept, 8.0, 608.0)):
        (writer,) = one["writers"]
        writer |= {"means": "cut", "ended": {"began": 2.0, "ended": ended, "freed": freed}}
    refused = fault("trap", 60.0, 98.0, means="cut")
    refused["writers"][0] |= {"means": "cut", "ended": {"began": 2.0}}
    fence, _, how_long, _ = findings.cut([cut, kept, refused])
    (line,) = fence["figures"]
    assert (line["sign"], line["n"], line["written after it"]) == ("cut returned", 2, 1)
    assert how_long["finding"].startswith("In 2 of 3: {'n': 2, 'median': 4.0, 'worst': 6.0}; blocked: ")
