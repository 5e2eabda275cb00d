// SPDX-License-Identifier: MIT
/*
 * The back end of a process that has the GPU to itself, and the choice of another one.
 * MPSD_STANDIN_MEMORY: the GPU's bytes.
 */
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define DEFAULT_MEMORY ((size_t)4 << 30)

static size_t used;

static CUresult attach(void)
{
	return CUDA_SUCCESS;
}

static void detach(void)
{
}

static size_t total_memory(void)
{
	const char *given = getenv("MPSD_STANDIN_MEMORY");

	return given ? strtoull(given, NULL, 0) : DEFAULT_MEMORY;
}

static size_t free_memory(void)
{
	return total_memory() - used;
}

static bool take_memory(size_t size)
{
	if (size > free_memory())
		return false;
	used += size;
	return true;
}

static void give_memory(size_t size)
{
	used -= size;
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
