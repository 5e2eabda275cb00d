"""The first CUDA call of a program: in constructors and threads, by CUDA's runtime, around fork and exec."""

from __future__ import annotations

from pathlib import Path

import pytest

from libcuda_build.header import find_include
from tests.libcuda.test_failed_calls import MODES
from tests.libcuda.test_proxy import ask
from tests.libcuda.test_ways_in import CONTEXT, WORKS
from tests.support.libcudas import PATHS, Libraries, compile_library
from tests.support.long import of

BOTH = pytest.mark.parametrize("proxied", [False, True], ids=["driver", "proxy"])

FIRST_CALL = """
#include <cuda.h>
#include <dlfcn.h>
int said = -1;
__attribute__((constructor)) static void first(void)
{
	CUdeviceptr memory = 0;
	CUcontext context = NULL;
#ifdef LINKED
#define FIND(name) __typeof__(&name) p_##name = name
#else
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
#define FIND(name) __typeof__(&name) p_##name = (__typeof__(&name))dlsym(library, #name)
#endif
	FIND(cuInit);
	FIND(cuDevicePrimaryCtxRetain);
	FIND(cuCtxSetCurrent);
	FIND(cuMemAlloc_v2);
	FIND(cuMemFree_v2);
	said = p_cuInit(0) || p_cuDevicePrimaryCtxRetain(&context, 0) || p_cuCtxSetCurrent(context) ||
		p_cuMemAlloc_v2(&memory, 100) || p_cuMemFree_v2(memory);
}
"""
SAID = "def said(path): return ctypes.c_int.in_dll(ctypes.CDLL(path), 'said').value\n"


@pytest.fixture(scope="module", params=["found", "linked"])
def constructor(
    request: pytest.FixtureRequest, libraries: Libraries, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a library whose constructor makes the first calls."""
    folder = tmp_path_factory.mktemp("constructor")
    (folder / "first.c").write_text(FIRST_CALL)
    linked = ["-DLINKED", str(libraries.real)] if request.param == "linked" else []
    return compile_library(folder / "first.so", folder / "first.c", *linked)


@BOTH
@pytest.mark.parametrize("vault", ["0", "1"])
def test_the_first_call_may_be_in_a_constructor(
    libraries: Libraries, constructor: Path, proxied: bool, vault: str
) -> None:
    """The constructor runs in dlopen(), or before main()."""
    script = """
codes = [said(sys.argv[1]), use(ctypes.CDLL("libcuda.so.1"))]
print(json.dumps([*codes, stats().state.name if stats() else None]))
"""
    expected = [0, WORKS, "ACTIVE" if proxied else None]
    environment = libraries.environment(proxied=proxied, vault=vault)
    assert ask(CONTEXT + SAID + script, environment, constructor) == (expected, "")
    environment["LD_PRELOAD"] = str(constructor)
    assert ask(CONTEXT + SAID + script, environment, constructor) == (expected, "")


@BOTH
def test_two_threads_may_load_it_at_once(libraries: Libraries, constructor: Path, proxied: bool) -> None:
    script = """
import threading
both, codes = threading.Barrier(2), []
def load(first):
    both.wait()
    codes.append(said(sys.argv[1]) if first else ctypes.CDLL("libcuda.so.1").cuInit(0))
threads = [threading.Thread(target=load, args=(first,)) for first in (True, False)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([codes, use(ctypes.CDLL("libcuda.so.1"))]))
"""
    for _ in range(of(40, 4)):
        answer, said = ask(CONTEXT + SAID + script, libraries.environment(proxied=proxied), constructor)
        assert (answer, said) == ([[0, 0], WORKS], "")


IN_THREAD = """
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#define EACH(with)							\\
	with(cuInit) with(cuDevicePrimaryCtxRetain) with(cuCtxSetCurrent)	\\
	with(cuModuleLoadData) with(cuModuleGetFunction) with(cuLaunchKernel)	\\
	with(cuCtxSynchronize)
#define KEEP(name) static __typeof__(&name) p_##name;
EACH(KEEP)
static const char image[] = "standin module\\nkernel nothing nothing 0\\n";
static void *call(void *said)
{
	CUcontext context;
	CUmodule module;
	CUfunction nothing;

	*(int *)said = p_cuInit(0) || p_cuDevicePrimaryCtxRetain(&context, 0) || p_cuCtxSetCurrent(context) ||
			p_cuModuleLoadData(&module, image) || p_cuModuleGetFunction(&nothing, module, "nothing") ||
			p_cuLaunchKernel(nothing, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) || p_cuCtxSynchronize();
	return NULL;
}
int said = -1;
__attribute__((constructor)) static void first(void)
{
	pthread_t thread;

#define FIND(name) p_##name = (__typeof__(p_##name))dlsym(RTLD_DEFAULT, #name);
	EACH(FIND)
	if (!pthread_create(&thread, NULL, call, &said))
		pthread_join(thread, NULL);
}
"""


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_the_first_calls_do_not_wait_for_the_loader(
    libraries: Libraries, tmp_path: Path, settings: dict[str, str]
) -> None:
    """A constructor waits for a thread that calls the driver, and dlopen() waits for the constructor."""
    (tmp_path / "thread.c").write_text(IN_THREAD)
    made = compile_library(tmp_path / "thread.so", tmp_path / "thread.c", "-lpthread")
    script = """
library = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
print(json.dumps([said(sys.argv[1]), use(library)]))
"""
    for proxied in (False, True):
        environment = libraries.environment(proxied=proxied, **settings if proxied else {})
        assert ask(CONTEXT + SAID + script, environment, made) == ([0, WORKS], "")


# -- fork and exec ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("vault", ["0", "1"])
def test_a_fork_while_another_thread_is_in_cuinit(
    libraries: Libraries, tmp_path: Path, proxied: bool, vault: str
) -> None:
    """The child is as that of an initialised program, and ends; the parent goes on."""
    script = """
import pathlib, select, threading
from tests.support.gate import INIT, Gate
gate = Gate(pathlib.Path(sys.argv[1]))
gate.keep(INIT)
library, codes = ctypes.CDLL("libcuda.so.1"), []
thread = threading.Thread(target=lambda: codes.append(library.cuInit(0)))
thread.start()
while gate.kept() != INIT:
    select.select([], [], [], 0.001)
child = os.fork()
if child == 0:
    os._exit(library.cuInit(0))
codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gate.keep(0)
thread.join()
print(json.dumps([codes, use(library)]))
"""
    environment = libraries.environment(proxied=proxied, vault=vault, PYTHONPATH=PATHS)
    environment["CUDA_MPS_PIPE_DIRECTORY"] = str(tmp_path)
    assert ask(CONTEXT + script, environment, tmp_path) == ([[3, 0], WORKS], "")


@BOTH
@pytest.mark.parametrize("vault", ["0", "1"])
def test_the_next_program_of_the_process_begins_anew(libraries: Libraries, proxied: bool, vault: str) -> None:
    script = """
library = ctypes.CDLL("libcuda.so.1")
codes, found = use(library), stats()
lives, asked = json.loads(os.environ.get("LIVES", "[]")), 0
if found:
    getproc(library, "cuMemAlloc")
    asked = stats().asked
lives.append([codes, found is None or found.pid == os.getpid(), asked, len(os.listdir("/proc/self/fd"))])
if len(lives) < 3:
    os.environ["LIVES"] = json.dumps(lives)
    os.execv(sys.executable, sys.orig_argv)
print(json.dumps(lives))
"""
    answer, said = ask(CONTEXT + script, libraries.environment(proxied=proxied, vault=vault))
    assert isinstance(answer, list) and answer == [answer[0]] * 3
    assert answer[0][:3] == [WORKS, True, int(proxied)]
    assert said == ""


# -- CUDA's runtime --------------------------------------------------------------------------------------

RUNTIME = """
#include <stddef.h>
int cudaDriverGetVersion(int *version);
int cudaGetDeviceCount(int *count);
int cudaMalloc(void **pointer, size_t size);
int cudaFree(void *pointer);
void runtime(int answers[6]);
void runtime(int answers[6])
{
	void *pointer = NULL;

	answers[0] = cudaDriverGetVersion(&answers[4]);
	answers[1] = cudaGetDeviceCount(&answers[5]);
	answers[2] = cudaMalloc(&pointer, 100);
	answers[3] = cudaFree(pointer);
}
"""


@pytest.fixture(scope="module")
def runtimes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return three libraries with runtimes of their own: two have it inside, as wheels do, one is linked."""
    folder = find_include().parent / "lib"
    dynamic = sorted(folder.glob("libcudart.so.*"))
    static = folder / "libcudart_static.a"
    if not dynamic or not static.exists():
        pytest.skip(f"{folder} has no CUDA runtime")
    made = tmp_path_factory.mktemp("runtimes")
    (made / "runtime.c").write_text(RUNTIME)
    inside = [str(static), "-lrt", "-lpthread"]
    linked = [str(dynamic[0]), f"-Wl,-rpath,{folder}"]
    flags = {"one.so": inside, "two.so": inside, "linked.so": linked}
    return [compile_library(made / name, made / "runtime.c", *flags[name]) for name in flags]


def test_several_runtimes_in_a_program(libraries: Libraries, runtimes: list[Path]) -> None:
    """The runtimes ask for private tables that the stand-in lacks, so they end with their look-ups."""
    script = """
answers = [(ctypes.c_int * 6)() for _ in sys.argv[1:]]
for path, each in zip(sys.argv[1:], answers):
    ctypes.CDLL(path).runtime(each)
found = stats()
counted = [found.state.name, found.asked, found.mapped, found.unknown] if found else None
print(json.dumps([[list(each) for each in answers], counted]))
"""
    plain, _ = ask(script, libraries.environment(proxied=False), *runtimes)
    answer, said = ask(script, libraries.environment(proxied=True), *runtimes)
    assert isinstance(answer, list) and isinstance(plain, list) and said == ""
    assert answer[0] == plain[0] and {each[4] for each in answer[0]} == {13000}
    state, asked, mapped, unknown = answer[1]
    assert (state, unknown) == ("ACTIVE", {}) and asked >= mapped > 100
