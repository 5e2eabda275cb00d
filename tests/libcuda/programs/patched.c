// SPDX-License-Identifier: MIT
/*
 * Patches cuMemAlloc in the way of tools that hook functions in place (UCX: "bistro"): the first bytes become a jump,
 * and a trampoline has the instructions that stood there. Prints the calls that the hook saw.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define JUMP_BYTES 5
#define CODE_BYTES 64
#define NEAR ((uintptr_t)1 << 30)
#define MOST_SEEN 8

static CUresult (*trampoline)(CUdeviceptr *, size_t);
static size_t seen[MOST_SEEN];
static unsigned int seen_count;

static CUresult hook(CUdeviceptr *to, size_t size)
{
	if (seen_count < MOST_SEEN)
		seen[seen_count++] = size;
	return trampoline(to, size);
}

static void fail(const char *what)
{
	fprintf(stderr, "patched: %s\n", what);
	exit(1);
}

static void *find(void *library, const char *name)
{
	void *found = dlsym(library, name);

	if (!found)
		fail(name);
	return found;
}

/*
 * Bytes of an instruction that runs at another address as it does at its own; 0 for any other one. What such tools know:
 * push and pop of a register, and mov between two registers.
 */
static size_t movable(const uint8_t *code)
{
	if (*code >= 0x50 && *code <= 0x5f)
		return 1;
	if (code[0] == 0x48 && code[1] == 0x89 && code[2] >= 0xc0)
		return 3;
	return 0;
}

static uint8_t *put_far_jump(uint8_t *at, const void *to)
{
	static const uint8_t jump[] = { 0xff, 0x25, 0, 0, 0, 0 };	/* jmp *0(%rip) */

	memcpy(at, jump, sizeof(jump));
	memcpy(at + sizeof(jump), &to, sizeof(to));
	return at + sizeof(jump) + sizeof(to);
}

static uint8_t *code_near(uintptr_t place)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);

	for (uintptr_t at = (place & ~(page - 1)) - NEAR; at < place + NEAR; at += NEAR / 64) {
		void *got = mmap((void *)at, page, PROT_READ | PROT_WRITE | PROT_EXEC,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);

		if (got != MAP_FAILED)
			return got;
	}
	fail("no room near the function");
	return NULL;
}

static void patch(uint8_t *function)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), first = (uintptr_t)function & ~(page - 1);
	uint8_t *code = code_near((uintptr_t)function), *from = code + CODE_BYTES;
	size_t moved = 0;
	int32_t way;

	while (moved < JUMP_BYTES) {
		size_t bytes = movable(function + moved);

		if (!bytes)
			fail("the first bytes of the function cannot be moved");
		moved += bytes;
	}
	memcpy(code, function, moved);
	put_far_jump(code + moved, function + moved);
	put_far_jump(from, (const void *)hook);
	trampoline = (__typeof__(trampoline))code;
	if (mprotect((void *)first, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC))
		fail("mprotect");
	way = (int32_t)(from - (function + JUMP_BYTES));
	function[0] = 0xe9;
	memcpy(function + 1, &way, sizeof(way));
	if (mprotect((void *)first, 2 * page, PROT_READ | PROT_EXEC))
		fail("mprotect");
}

int main(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	CUresult (*asked)(CUdeviceptr *, size_t) = NULL;
	CUdeviceptr memory[3] = { 0 };
	CUcontext context;

	if (!library)
		fail(dlerror());
	__typeof__(&cuInit) init = find(library, "cuInit");
	__typeof__(&cuDevicePrimaryCtxRetain) retain = find(library, "cuDevicePrimaryCtxRetain");
	__typeof__(&cuCtxSetCurrent) use = find(library, "cuCtxSetCurrent");
	__typeof__(&cuMemAlloc) allocate = find(library, "cuMemAlloc_v2");
	__typeof__(&cuMemFree) release = find(library, "cuMemFree_v2");
	__typeof__(&cuGetProcAddress_v2) getproc = find(library, "cuGetProcAddress_v2");

	if (init(0) || retain(&context, 0) || use(context) || allocate(&memory[0], 100))
		fail("the driver does not work before the patch");
	patch((uint8_t *)allocate);
	if (allocate(&memory[1], 200) || getproc("cuMemAlloc", (void **)&asked, 12040, 0, NULL) ||
	    asked(&memory[2], 300))
		fail("the driver does not work behind the patch");
	for (int i = 0; i < 3; i++)
		if (!memory[i] || release(memory[i]))
			fail("what was allocated cannot be freed");
	for (unsigned int i = 0; i < seen_count; i++)
		printf("%zu\n", seen[i]);
	return 0;
}
