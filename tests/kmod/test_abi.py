"""mpsd-abi.h as compiled, against the Python reader: sizes, offsets, numbers, requests."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path

import pytest

from mpsd.base.model import Access, UvmFaultType, UvmReason
from mpsd.gpu.nvidia import kernel_abi as abi
from tests.kmod import native

STRUCTS = {
    "mpsd_record": abi.RECORD,
    "mpsd_query": abi.QUERY,
    "mpsd_set_mode": abi.SET_MODE,
    "mpsd_target": abi.TARGET,
}
IOCTLS = {
    "MPSD_IOC_QUERY": abi.IOC_QUERY,
    "MPSD_IOC_SET_MODE": abi.IOC_SET_MODE,
    "MPSD_IOC_ACKNOWLEDGE": abi.IOC_ACKNOWLEDGE,
    "MPSD_IOC_KILL": abi.IOC_KILL,
    "MPSD_IOC_RELEASE": abi.IOC_RELEASE,
}
DEFINES = {
    "MPSD_ABI_VERSION": abi.ABI_VERSION,
    "MPSD_RING_RECORDS": abi.RING_RECORDS,
    "MPSD_FLAG_REPLAYABLE": abi.FLAG_REPLAYABLE,
    "MPSD_FLAG_CONDEMNED": abi.FLAG_CONDEMNED,
    "MPSD_FLAG_ACKNOWLEDGED": abi.FLAG_ACKNOWLEDGED,
    "MPSD_FLAG_RELEASED": abi.FLAG_RELEASED,
}
# The header's names of UVM's numbers that mpsd.base.model names differently.
OTHER_NAMES = {"VA_LIMIT": "LIMIT", "CC": "CONFIDENTIAL"}


def header() -> str:
    return native.without_comments(native.HEADER.read_text())


def members(structure: str) -> list[str]:
    body = re.search(rf"struct {structure} \{{(.*?)\}};", header(), re.DOTALL)
    assert body is not None, structure
    return re.findall(r"(\w+)(?:\[\w+\])?;", body[1])


def names(pattern: str) -> list[str]:
    return re.findall(pattern, header())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Return every size, offset and number of the header, printed by a program that includes it."""
    asked: dict[str, str] = {}
    for structure in STRUCTS:
        asked[structure] = f"sizeof(struct {structure})"
        for member in members(structure):
            asked[f"{structure}.{member}"] = f"offsetof(struct {structure}, {member})"
            asked[f"{structure}.{member}:size"] = f"sizeof(((struct {structure} *)0)->{member})"
    for name in names(r"(?m)^\s*(MPSD_\w+)(?: = \d+)?,?\s*$"):
        asked[name] = name
    for name in [*names(r"#define (MPSD_IOC_\w+) _IO"), *DEFINES, "MPSD_NO_CHANNEL", "MPSD_NO_ID"]:
        asked[name] = name
    lines = (
        f'\tprintf("%s %llu\\n", "{name}", (unsigned long long)({code}));' for name, code in asked.items()
    )
    folder = tmp_path_factory.mktemp("abi")
    source = folder / "abi.c"
    source.write_text(
        '#include "mpsd-abi.h"\n#include <stddef.h>\n#include <stdio.h>\n'
        "int main(void)\n{\n" + "\n".join(lines) + "\n\treturn 0;\n}\n"
    )
    said = native.run(native.compile_program(folder / "abi", [source])).decode()
    return {name: int(number) for name, number in (line.split() for line in said.splitlines())}


@pytest.mark.parametrize("structure", STRUCTS)
def test_fields_lie_where_the_reader_looks(structure: str, compiled: dict[str, int]) -> None:
    layout = STRUCTS[structure]
    sizes = [struct.calcsize(f"={item}") for item in re.findall(r"\d*[a-zA-Z]", layout.format)]
    expected = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    found = [
        (compiled[f"{structure}.{name}"], compiled[f"{structure}.{name}:size"]) for name in members(structure)
    ]
    assert found == expected
    assert compiled[structure] == layout.size


def test_every_field_is_aligned_and_there_is_no_padding(compiled: dict[str, int]) -> None:
    for structure in STRUCTS:
        end = 0
        for name in members(structure):
            at, size = compiled[f"{structure}.{name}"], compiled[f"{structure}.{name}:size"]
            assert at == end, f"{structure}.{name} leaves a hole that would carry the kernel's memory"
            end = at + size
        assert end == compiled[structure]
        assert compiled[structure] % 8 == 0


def test_requests(compiled: dict[str, int]) -> None:
    assert {name: compiled[name] for name in names(r"#define (MPSD_IOC_\w+) _IO")} == IOCTLS


def test_defines_and_what_is_unknown(compiled: dict[str, int]) -> None:
    assert {name: compiled[name] for name in DEFINES} == DEFINES
    assert (compiled["MPSD_NO_CHANNEL"], compiled["MPSD_NO_ID"]) == (0xFFFF_FFFF, 0xFFFF)
    assert names(r'MPSD_DEVICE_NAME "(.*)"') == [abi.DEVICE.removeprefix("/dev/")]


def numbered(compiled: dict[str, int], prefix: str) -> dict[str, int]:
    """Map NAME to number, for the header's enumerators that begin with `prefix`."""
    found = {name.removeprefix(prefix): value for name, value in compiled.items() if name.startswith(prefix)}
    return {OTHER_NAMES.get(name, name): value for name, value in found.items() if name != "COUNT"}


@pytest.mark.parametrize(
    ("prefix", "kind"),
    [
        ("MPSD_MODE_", abi.Mode),
        ("MPSD_ACTION_", abi.Action),
        ("MPSD_WHY_", abi.Why),
        ("MPSD_ENGINE_", abi.Engine),
        ("MPSD_CLIENT_", abi.ClientType),
        ("MPSD_FAULT_", UvmFaultType),
        ("MPSD_REASON_", UvmReason),
    ],
)
def test_numbers_have_the_names_of_the_reader(
    prefix: str, kind: type[abi.Mode], compiled: dict[str, int]
) -> None:
    assert numbered(compiled, prefix) == {
        member.name: member.value for member in kind if member.name != "UNKNOWN"
    }


def test_accesses(compiled: dict[str, int]) -> None:
    for name, value in numbered(compiled, "MPSD_ACCESS_").items():
        raw = bytearray(abi.RECORD.size)
        struct.pack_into("=HH", raw, 0, 1, abi.RECORD.size)
        raw[compiled["mpsd_record.access"]] = value
        assert abi.decode_record(bytes(raw)).access is Access[name]


@pytest.mark.parametrize("language", ["gnu89", "gnu11", "gnu17"])
def test_own_files_compile_in_the_kernels_languages_and_call_nothing(language: str, tmp_path: Path) -> None:
    for source in (*native.POLICY, "mpsd-ring.c"):
        target = tmp_path / f"{source}.o"
        command = ["gcc", f"-std={language}", "-O2", "-ffreestanding", "-Wall", "-Wextra", "-Werror"]
        command += ["-Wdeclaration-after-statement", "-c", "-o", str(target), str(native.SOURCES / source)]
        subprocess.run(command, check=True, timeout=native.DEADLINE_S)
        said = subprocess.run(
            ["nm", "--undefined-only", str(target)],
            check=True,
            timeout=native.DEADLINE_S,
            capture_output=True,
            text=True,
        ).stdout
        # The kernel has these three, and the compiler may call them for a structure.
        assert {line.split()[-1] for line in said.splitlines()} <= {"memset", "memcpy", "memmove"}
