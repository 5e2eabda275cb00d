"""MPSD_FAILOVER=validate names operations that write memory without a snapshot, and nothing else."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.libcuda.test_exact import gate, move
from tests.libcuda.test_failover import Program, ask, break_domain, copies, post, stand_by
from tests.support import images, moving
from tests.support.gate import Gate
from tests.support.images import ELF, LZ4, PTX, ZSTD, elf, fatbin, part
from tests.support.moving import Post
from tests.support.simfixtures import backend, domain, second, third
from tests.support.simnode import Domain

__all__ = ["ask", "backend", "copies", "domain", "gate", "post", "second", "third"]

VALIDATED = pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "validate"}], indirect=True)
DECLARED = (
    b".version 8.0\n.visible .global .align 4 .u32 counter;\n.global .align 1 .b8 $str[4] = {37, 100};\n"
)


def found(said: str) -> tuple[int, int, int]:
    """Return counts: pages written outside all parameters, writes to variables, operations that were not
    checked."""
    numbers = [int(word) for word in said.rsplit("validated: ", 1)[1].split() if word.isdigit()]
    operations, strays, variables, unsure, unread = numbers
    assert (operations > 0, unread) == (True, 0)
    return strays, variables, unsure


def load(ask: Program, image: bytes) -> None:
    """Load a module with `count` and `add`."""
    ask(f"module = gpu.made('cuModuleLoadData', {image!r})")
    ask("gpu.functions['count'] = gpu.made('cuModuleGetFunction', module, b'count')")


def run_count(ask: Program) -> str:
    return ask("gpu.code('cuLaunchKernel', gpu.functions['count'], 1, 1, 1, 1, 1, 1, 0, 0, None, None)")


FOLLOW = "gpu.code('cuLaunchKernel', gpu.functions['follow'], 1, 1, 1, 1, 1, 1, 0, 0, given, None)"
"""Write 7 to the address that `m` holds: the address of `other`."""


def prepare_follow(ask: Program) -> None:
    ask("m = gpu.memory(4 << 20); other = gpu.memory(4 << 20); at = ctypes.c_uint64(other)")
    ask("f = gpu.made('cuModuleLoadData', b'standin module\\nkernel follow follow 0\\n')")
    ask("gpu.functions['follow'] = gpu.made('cuModuleGetFunction', f, b'follow')")
    ask("gpu('cuMemcpyHtoD_v2', m, ctypes.byref(at), 8)")
    ask("value = ctypes.c_uint32(7); where = ctypes.c_uint64(m)")
    ask("given = (ctypes.c_void_p * 2)(ctypes.addressof(where), ctypes.addressof(value))")


@VALIDATED
def test_what_writes_where_its_parameters_do_not_lead_is_named(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    prepare_follow(ask)
    # No operation has ever saved the other memory.
    assert ask("gpu.run('add', m + 64, 8, 1), gpu.sync()") == "(0, 0)"
    assert ask(f"{FOLLOW}, gpu.sync(), gpu.word(other)") == "(0, 0, 7)"
    said = ask.end().splitlines()
    assert "follow writes at 0x" in said[0] and "which its parameters do not reach" in said[0]
    assert found(said[1]) == (1, 0, 0)
    assert said[2].endswith(": MPSD_FAILOVER_KERNELS=unsure:follow") and len(said) == 3


@VALIDATED
def test_a_long_list_of_kernels_is_printed_whole(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    names = [f"{number:02}{'k' * 58}" for number in range(20)]
    image = "standin module\n" + "".join(f"kernel {name} follow 0\n" for name in names)
    prepare_follow(ask)
    ask(f"module = gpu.made('cuModuleLoadData', {image.encode()!r})")
    assert ask("gpu.run('add', m + 64, 8, 1), gpu.sync()") == "(0, 0)"
    for name in names:
        ask(f"gpu.functions['follow'] = gpu.made('cuModuleGetFunction', module, {name.encode()!r})")
        assert ask(f"{FOLLOW}, gpu.sync(), gpu.put(other, 0)") == "(0, 0, 0)"
    listed = ask.end().splitlines()[-1].partition("MPSD_FAILOVER_KERNELS=")[2]
    assert listed == ",".join(f"unsure:{name}" for name in names)


@VALIDATED
def test_memory_that_comes_where_other_memory_was_is_no_write(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20)")
    for _ in range(3):
        ask("other = gpu.memory(64 << 20)")
        assert ask("gpu.run('add', other, 8, 1), gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0, 0)"
        ask("gpu('cuMemFree_v2', other)")
        assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    said = ask.end()
    assert found(said) == (0, 0, 0) and said.count("\n") == 1


@VALIDATED
def test_validation_goes_on_after_a_move(
    domain: Domain, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20)")
    load(ask, elf(["counter"]))
    stand_by(line, second, copies)
    assert ask("gpu.run('add', m, 8, 5), gpu.sync()") == "(0, 0)"
    break_domain(domain)
    said = line.move(1, again=1)
    assert (said.kind, said.text) == (moving.MOVED, "")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync(), gpu.word(m)") == "(0, 0, 6)"
    assert run_count(ask) == "0"
    said_by_it = ask.end().splitlines()
    assert said_by_it[0].endswith(
        "count writes the module variable counter, which fail-over does not preserve"
    )
    assert found(said_by_it[1]) == (0, 1, 0)


IMAGES = {
    "elf": lambda: elf(["other", "counter", "$str"]),
    "elf, unknown names": lambda: elf(["none", "counter"]),
    "ptx": lambda: DECLARED + images.TEXT,
    "fat": lambda: fatbin(part(ELF, 90, elf(["counter"], text=b""))),
    "fat, of another GPU too": lambda: fatbin(
        part(ELF, 100, elf(["of100"], text=b"")),
        part(ELF, 80, elf(["counter"], text=b"")),
        part(PTX, 80, b""),
    ),
    "fat, ptx": lambda: fatbin(part(PTX, 80, DECLARED)),
    "fat, zstd": lambda: fatbin(part(ELF, 80, elf(["counter"], text=b""), ZSTD)),
    "fat, lz4": lambda: fatbin(part(ELF, 80, elf(["counter"], text=b""), LZ4)),
}


def image_of(name: str) -> bytes:
    try:
        return IMAGES[name]()
    except OSError as error:
        pytest.skip(f"no library that packs: {error}")


@VALIDATED
@pytest.mark.parametrize("name", IMAGES)
def test_a_kernel_that_writes_a_variable_of_its_module_is_named(post: Post, ask: Program, name: str) -> None:
    post.greet(moving.EXACT)
    load(ask, image_of(name))
    ask("m = gpu.memory(4 << 20)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    assert (run_count(ask), run_count(ask)) == ("0", "0")
    said = ask.end().splitlines()
    assert said[0].endswith("count writes the module variable counter, which fail-over does not preserve")
    assert found(said[1]) == (0, 2, 0)
    assert said[2].endswith(": MPSD_FAILOVER_KERNELS=opaque:count") and len(said) == 3


NAMED = {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_KERNELS": "unsure:none,unsure:follow,,opaque:count,"}


@pytest.mark.parametrize("ask", [NAMED], indirect=True)
def test_who_is_named_to_it_is_not_done_again_silently(
    domain: Domain, gate: Gate, second: Domain, post: Post, ask: Program, copies: Path
) -> None:
    line = post.greet(moving.EXACT)
    prepare_follow(ask)
    stand_by(line, second, copies)
    gate.let(0)
    assert ask(f"gpu.run('add', m, 8, 1), {FOLLOW}") == "(0, 0)"
    break_domain(domain)
    why = "a kernel that writes memory not reachable from its parameters: follow"
    assert move(line).text == why
    assert ask("gpu.sync(), gpu.sync()") == "(719, 0)"
    assert why in ask.end()


@pytest.mark.parametrize("ask", [NAMED], indirect=True)
def test_who_keeps_something_in_a_variable_is_not_carried_over(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT)
    load(ask, elf(["counter"]))
    assert run_count(ask) == "0"
    assert line.hear(moving.OPAQUE).text == "a kernel that writes a module variable: count"


@VALIDATED
def test_a_graph_with_such_a_kernel_is_named(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    load(ask, elf(["counter"]))
    ask("stream = gpu.made('cuStreamCreate', 1); gpu('cuStreamBeginCapture_v2', stream, 2)")
    ask("gpu('cuLaunchKernel', gpu.functions['count'], 1, 1, 1, 1, 1, 1, 0, stream, None, None)")
    ask("graph = ctypes.c_uint64(); gpu('cuStreamEndCapture', stream, ctypes.byref(graph))")
    ask("whole = gpu.made('cuGraphInstantiateWithFlags', graph.value, 0)")
    assert (
        ask("gpu.code('cuGraphLaunch', whole, stream), gpu.code('cuStreamSynchronize', stream)") == "(0, 0)"
    )
    said = ask.end().splitlines()
    assert said[0].endswith("a graph writes the module variable counter, which fail-over does not preserve")
    assert found(said[1]) == (0, 1, 0)


@VALIDATED
def test_what_the_host_puts_into_a_variable_is_no_kernels_write(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    load(ask, elf(["counter", "other"]))
    ask("m = gpu.memory(4 << 20); other = ctypes.c_uint64()")
    ask("gpu('cuModuleGetGlobal_v2', ctypes.byref(other), None, module, b'other')")
    ask("gpu.functions['add'] = gpu.made('cuModuleGetFunction', module, b'add')")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    ask("gpu('cuMemcpyHtoD_v2', other.value, ctypes.byref(ctypes.c_uint32(3)), 4)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    said = ask.end()
    assert found(said) == (0, 0, 0) and said.count("\n") == 1


@VALIDATED
@pytest.mark.parametrize(
    ("image", "words"),
    [
        (elf(["counter"], undefined=["malloc", "vprintf"]), "a code image uses the device heap"),
        (fatbin(part(ELF, 120, elf(["counter"]))), "module variables of a code image are not checked"),
        (fatbin(part(ELF, 90, b"\x7fELF of no kind")), "module variables of a code image are not checked"),
    ],
    ids=["heap", "for no GPU that is here", "broken"],
)
def test_what_cannot_be_looked_at_is_told(post: Post, ask: Program, image: bytes, words: str) -> None:
    post.greet(moving.EXACT)
    load(ask, image)
    run_count(ask)
    assert words in ask.end()


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: PTX cannot be put together here")
@pytest.mark.parametrize("name", ["pages", "saver", "sums"])
def test_the_kernels_are_ptx(tmp_path: Path, name: str) -> None:
    source = Path(__file__).resolve().parents[2] / f"clients/libcuda/src/exact/{name}.c"
    lines = [line.strip() for line in source.read_text().splitlines() if line.strip().startswith('"')]
    # The C literals use only escapes that Python shares.
    (tmp_path / "code.ptx").write_text("".join(ast.literal_eval(line.rstrip(";")) for line in lines))
    for arch in ("sm_80", "sm_90", "sm_100"):
        done = subprocess.run(
            [
                "nvcc",
                "-cubin",
                f"-arch={arch}",
                "-o",
                str(tmp_path / "code.cubin"),
                str(tmp_path / "code.ptx"),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="no nvcc: there is no code of its own to be read here"
)
@VALIDATED
def test_code_of_the_compiler_is_read(post: Post, ask: Program, tmp_path: Path) -> None:
    (tmp_path / "code.cu").write_text(
        "__device__ unsigned counter; static __device__ int other[16];\n"
        'extern "C" __global__ void count() { counter++; other[threadIdx.x] += counter; }\n'
    )
    ways = [["-cubin", "-arch=sm_80"], ["-ptx", "-arch=sm_80"]]
    for mode in ("none", "size"):
        ways.append(
            ["-fatbin", "-gencode", "arch=compute_80,code=[sm_80,compute_80]", f"--compress-mode={mode}"]
        )
    post.greet(moving.EXACT)
    for number, way in enumerate(ways):
        out = tmp_path / f"{number}.code"
        subprocess.run(["nvcc", *way, "-o", str(out), str(tmp_path / "code.cu")], timeout=60, check=True)
        image = out.read_bytes()
        # The stand-in's own text goes where neither format looks.
        load(ask, with_text(image))
        assert run_count(ask) == "0"
    said = ask.end().splitlines()
    # A kernel is named once.
    assert said[0].endswith("the module variable counter, which fail-over does not preserve")
    assert found(said[-2]) == (0, len(ways), 0)
    assert said[-1].endswith(": MPSD_FAILOVER_KERNELS=opaque:count")


def with_text(image: bytes) -> bytes:
    """Add the stand-in driver's text to the compiler's image."""
    if image.startswith(b"\x7fELF"):
        return fatbin(part(ELF, 80, image))
    if image.startswith(b"\x50\xed\x55\xba"):
        body = image[16:] + part(0x40, 1, images.TEXT)
        return image[:8] + len(body).to_bytes(8, "little") + body
    return image.rstrip(b"\0") + b"\n" + images.TEXT


@pytest.mark.parametrize(
    "ask", [{"MPSD_FAILOVER_SOCKET": "", "MPSD_FAILOVER": "validate"}], indirect=True, ids=["no socket"]
)
def test_silence_is_no_result(ask: Program) -> None:
    assert ask("gpu.sync()") == "0"
    assert ": validation disabled: the daemon offers no fail-over" in ask.end()


@pytest.mark.parametrize("ask", [{"MPSD_FAILOVER": "yes"}], indirect=True)
def test_an_unknown_mode_is_reported(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    assert "MPSD_FAILOVER=yes is not one of off, keep, exact, validate: using exact" in ask.end()


@pytest.mark.parametrize(
    "ask", [{"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_KERNELS": "follow,opaque:count"}], indirect=True
)
def test_a_kernel_without_a_kind_is_reported(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    said = ask.end()
    assert "MPSD_FAILOVER_KERNELS: follow is ignored: write unsure:KERNEL or opaque:KERNEL" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "ask", [{"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_VALIDATE": "1"}], indirect=True, ids=["previous"]
)
def test_the_variable_of_the_previous_release_validates(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    first, last = ask.end().splitlines()
    assert first.endswith(
        "MPSD_FAILOVER_VALIDATE is deprecated and the next release ignores it; "
        "set MPSD_FAILOVER=validate instead"
    )
    assert "validated: 0 operations" in last


@pytest.mark.parametrize(
    "ask", [{"MPSD_FAILOVER": "keep", "MPSD_FAILOVER_VALIDATE": "1"}], indirect=True, ids=["less"]
)
def test_less_than_exact_does_not_validate(post: Post, ask: Program) -> None:
    post.greet()
    assert "validated" not in ask.end()


PREVIOUS = {"MPSD_FAILOVER": "exact", "MPSD_FAILOVER_UNSURE": "follow", "MPSD_FAILOVER_OPAQUE": "none"}


@pytest.mark.parametrize("ask", [PREVIOUS], indirect=True, ids=["previous"])
def test_lists_of_the_previous_release_are_read(post: Post, ask: Program) -> None:
    line = post.greet(moving.EXACT)
    prepare_follow(ask)
    assert ask(f"{FOLLOW}, gpu.sync()") == "(0, 0)"
    assert line.why_unsure() == "a kernel that writes memory not reachable from its parameters: follow"
    said = ask.end().splitlines()
    assert [line.rpartition("; ")[2] for line in said] == [
        "set MPSD_FAILOVER_KERNELS=unsure:KERNEL instead",
        "set MPSD_FAILOVER_KERNELS=opaque:KERNEL instead",
    ]


@VALIDATED
def test_it_is_told_where_validation_ends_before_the_program(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    ask("gpu.code('cuIpcCloseMemHandle', 0)")
    assert ask("gpu.run('add', m, 8, 1), gpu.sync()") == "(0, 0)"
    first, last = ask.end().splitlines()
    assert first.endswith("validation stopped: cuIpcCloseMemHandle")
    assert "validated until validation stopped: " in last


@VALIDATED
def test_a_program_that_does_nothing_is_told_that_nothing_was_looked_at(post: Post, ask: Program) -> None:
    post.greet(moving.EXACT)
    assert "validated: 0 operations" in ask.end()


@VALIDATED
def test_a_lost_context_does_not_end_it(
    domain: Domain, second: Domain, third: Domain, post: Post, ask: Program, copies: Path
) -> None:
    """Validation continues after lost contexts, whatever work is in progress: it is moved and checked
    again."""
    line = post.greet(moving.EXACT)
    ask("m = gpu.memory(4 << 20); later = Later(gpu)")
    for generation, (lost, to) in enumerate(((domain, second), (second, third)), 1):
        stand_by(line, to, copies, generation)
        ask("later.start(\"[gpu.run('add', m, 8, 1) for _ in range(200)] and gpu.sync()\")")
        break_domain(lost)
        assert line.move(generation, again=1).kind == moving.MOVED
        assert ask("later.result()") == "0"
    assert ask("gpu.word(m)") == "400"
    said = ask.end().splitlines()
    assert found(said[-1]) == (0, 0, 0)
