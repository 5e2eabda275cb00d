"""The versions of a driver's functions: each way to a name leads to the function that the driver gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from libcuda_build.emit import SPARE
from tests.libcuda.test_proxy import ask
from tests.support import namesdriver
from tests.support.libcudas import Libraries
from tests.support.namesdriver import NamesDriver

# CUDA 11.4 to 13.5: the callers, from programs older than the oldest driver of the proxy to the newest.
CALLERS = [*range(11040, 11090, 10), *range(12000, 12100, 10), *range(13000, 13060, 10)]
FEW = 40


@pytest.fixture(scope="module", params=[12040, 13050])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> NamesDriver:
    return namesdriver.build(tmp_path_factory.mktemp("names"), request.param, FEW)


def environment(libraries: Libraries, driver: NamesDriver) -> dict[str, str]:
    return libraries.environment(proxied=True) | {"MPSD_REAL_LIBCUDA": str(driver.path)}


EACH = """
given = json.load(open(sys.argv[1]))
library, driver = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(given["path"])
lookups, wrong = 0, []
ask = {True: library.cuGetProcAddress_v2, False: driver.cuGetProcAddress_v2}
libc, info = ctypes.CDLL(None), Info()
for base in given["bases"]:
    for version in given["callers"]:
        for flags in (0, 2):
            found = []
            for proxied in (True, False):
                pointer = ctypes.c_void_p()
                of = base.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(flags), None
                code = ask[proxied](*of)
                found.append((code, pointer.value))
            lookups += 1
            if found[0][0] or found[1][0]:
                if found[0] != found[1]:
                    wrong.append((base, version, flags, found))
                continue
            libc.dladdr(ctypes.c_void_p(found[0][1]), ctypes.byref(info))
            symbol, file = info.symbol.decode(), info.file.decode()
            behind = ctypes.cast(getattr(driver, symbol), ctypes.c_void_p).value
            if file == given["path"] or behind != found[1][1]:
                wrong.append((base, version, flags, symbol, file))
print(json.dumps([lookups, wrong[:20]]))
"""


def test_each_name_in_each_version_is_the_drivers(
    libraries: Libraries, driver: NamesDriver, tmp_path: Path
) -> None:
    given = tmp_path / "given"
    given.write_text(json.dumps({"path": str(driver.path), "bases": driver.bases, "callers": CALLERS}))
    answer, said = ask(EACH, environment(libraries, driver), given)
    assert answer == [len(driver.bases) * len(CALLERS) * 2, []]
    assert said == ""


def test_a_context_is_made_by_the_version_that_the_caller_knows(
    libraries: Libraries, driver: NamesDriver
) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
def number(name, version):
    pointer = ctypes.c_void_p()
    library.cuGetProcAddress_v2(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(0), None)
    return ctypes.CFUNCTYPE(ctypes.c_int)(pointer.value)()
print(json.dumps([number("cuCtxCreate", version) for version in (3010, 3020, 11030, 12040, 13000)]))
"""
    answer, _ = ask(script, environment(libraries, driver))
    newest = "cuCtxCreate_v4" if "cuCtxCreate_v4" in driver.numbers else "cuCtxCreate_v3"
    expected = ["cuCtxCreate", "cuCtxCreate_v2", "cuCtxCreate_v2", "cuCtxCreate_v3", newest]
    assert answer == [driver.numbers[name] for name in expected]


CALL = """
library = ctypes.CDLL("libcuda.so.1")
numbers = json.load(open(sys.argv[1]))
missing = [name for name in numbers if not hasattr(library, name)]
wrong = [name for name in numbers if hasattr(library, name) and getattr(library, name)() != numbers[name]]
found = stats()
print(json.dumps([missing, wrong, found.added, found.lacking]))
"""


def test_each_name_leads_to_the_drivers_function(
    libraries: Libraries, driver: NamesDriver, tmp_path: Path
) -> None:
    given = tmp_path / "numbers"
    # The one function without parameters of which the proxy looks at the arguments.
    numbers = {name: number for name, number in driver.numbers.items() if name != "cuGetExportTable"}
    given.write_text(json.dumps({**numbers, "cuOwnChosen": namesdriver.CHOSEN}))
    answer, said = ask(CALL, environment(libraries, driver), given)
    assert answer == [[], [], FEW + 2, 0]
    assert said == ""


def test_a_driver_may_have_more_names_than_there_is_room_for(libraries: Libraries, tmp_path: Path) -> None:
    """Names beyond the reserve are found by cuGetProcAddress alone, past the proxy, and counted."""
    beyond = 10
    driver = namesdriver.build(tmp_path, 13050, SPARE - 2 + beyond)
    script = """
library = ctypes.CDLL("libcuda.so.1")
own = [*filter(lambda name: name.startswith(("cuOwn", "cuMemAllocShared")), json.load(open(sys.argv[1])))]
found = [name for name in own if hasattr(library, name)]
past = [name for name in own if getproc(library, name) == sys.argv[2]]
print(json.dumps([len(found), len(past), stats().added, stats().lacking, stats().state.name]))
"""
    given = tmp_path / "numbers"
    # By cuGetProcAddress this driver finds what is in its list, and so not cuOwnChosen.
    given.write_text(json.dumps([*driver.numbers, "cuOwnChosen"]))
    answer, said = ask(script, environment(libraries, driver), given, driver.path.parent)
    assert answer == [SPARE, beyond, SPARE, beyond, "ACTIVE"]
    assert said == ""
