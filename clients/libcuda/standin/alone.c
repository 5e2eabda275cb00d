// SPDX-License-Identifier: MIT
/*
 * The back end of a process that has the GPU to itself, and the choice of another one.
 * MPSD_STANDIN_MEMORY: the GPU's bytes. MPSD_STANDIN_USED: a file of eight bytes, how many are in use, for programs and
 * copies of this library that share them. What a process had is not given back at its end.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "standin.h"

#define DEFAULT_MEMORY ((size_t)4 << 30)

/* With the lock of the GPU; others change what is shared. */
static uint64_t own, *used = &own;
static bool is_found;

static uint64_t *find_used(void)
{
	const char *path = is_found ? NULL : getenv("MPSD_STANDIN_USED");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *shared = fd >= 0 ? mmap(NULL, sizeof(*used), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;

	is_found = true;
	if (fd >= 0)
		close(fd);
	if (shared != MAP_FAILED)
		used = shared;
	return used;
}

static CUresult attach(void)
{
	return CUDA_SUCCESS;
}

static void detach(void)
{
}

size_t environment_bytes(const char *name, size_t otherwise)
{
	const char *given = getenv(name);

	return given ? strtoull(given, NULL, 0) : otherwise;
}

static size_t total_memory(void)
{
	return environment_bytes("MPSD_STANDIN_MEMORY", DEFAULT_MEMORY);
}

static size_t free_memory(void)
{
	uint64_t taken = __atomic_load_n(find_used(), __ATOMIC_RELAXED);

	return taken < total_memory() ? total_memory() - taken : 0;
}

static bool take_memory(size_t size)
{
	uint64_t *taken = find_used();

	if (__atomic_add_fetch(taken, size, __ATOMIC_RELAXED) <= total_memory())
		return true;
	__atomic_sub_fetch(taken, size, __ATOMIC_RELAXED);
	return false;
}

static void give_memory(size_t size)
{
	__atomic_sub_fetch(find_used(), size, __ATOMIC_RELAXED);
}

/* There is nobody to be told. */
static bool cover(CUdeviceptr base, size_t size, bool managed)
{
	(void)base;
	(void)size;
	(void)managed;
	return true;
}

static void uncover(CUdeviceptr base, size_t size, bool managed)
{
	(void)base;
	(void)size;
	(void)managed;
}

static CUresult fault(CUdeviceptr address, enum access access)
{
	if (access == ACCESS_NONE)
		return CUDA_ERROR_LAUNCH_FAILED;
	return range_at(address, RANGE_MANAGED, RANGE_SPARSE) ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static CUresult look(void)
{
	return CUDA_SUCCESS;
}

static bool begin(void)
{
	return true;
}

static bool end(void)
{
	return true;
}

static bool is_halted(void)
{
	return false;
}

static const struct backend alone = {
	.name = "alone",
	.attach = attach,
	.detach = detach,
	.total_memory = total_memory,
	.free_memory = free_memory,
	.take_memory = take_memory,
	.give_memory = give_memory,
	.cover = cover,
	.uncover = uncover,
	.fault = fault,
	.look = look,
	.begin = begin,
	.end = end,
	.is_halted = is_halted,
};

const struct backend *backend = &alone;

void choose_backend(void)
{
	const char *given = getenv("MPSD_STANDIN_GPU");

	if (given && !strcmp(given, "simulated"))
		backend = simulated_backend(&alone);
}
