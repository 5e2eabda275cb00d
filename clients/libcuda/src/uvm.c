// SPDX-License-Identifier: MIT
#include "uvm.h"

#include <string.h>
#include <sys/ioctl.h>

#define UVM_FREE 34ul
#define UVM_SET_PREFERRED_LOCATION 42ul
#define UVM_CREATE_EXTERNAL_RANGE 73ul
#define UVM_MAP_EXTERNAL_SPARSE 74ul
#define UNWRITTEN UINT32_MAX

struct external_range {
	uint64_t base, length;
	uint32_t status, padding;
};

struct external_sparse {
	uint64_t base, length;
	uint8_t gpu[16];
	uint32_t status, padding;
};

/* From branch 610 on the status lies where the length was. */
struct free_range {
	uint64_t base;
	union {
		uint64_t length;
		uint32_t status_since_610;
	};
	uint32_t status, padding;
};

struct preferred_location {
	uint64_t base, length;
	uint8_t processor[16];
	int32_t node;
	uint32_t status;
};

struct gpu_space {
	uint8_t gpu[16];
	uint32_t status;
};

/* The CPU, as UVM calls it. */
static const uint8_t cpu[16] = {
	0xa6, 0x5e, 0x0f, 0x4e, 0xd7, 0xd4, 0x7b, 0xa2, 0x50, 0x47, 0x41, 0x2c, 0x14, 0x2a, 0x77, 0x73,
};

_Static_assert(sizeof(struct preferred_location) == 40 && sizeof(struct external_range) == 24 &&
	       sizeof(struct external_sparse) == 40 && sizeof(struct free_range) == 24 &&
	       sizeof(struct gpu_space) == 20, "the layouts are the driver's");

bool mpsd_uvm_external(int fd, uint64_t base, size_t size)
{
	struct external_range range = { base, size, UNWRITTEN, 0 };

	return !ioctl(fd, UVM_CREATE_EXTERNAL_RANGE, &range) && !range.status;
}

bool mpsd_uvm_map_sparse(int fd, uint64_t base, size_t size, const uint8_t gpu[16])
{
	struct external_sparse sparse = { base, size, { 0 }, UNWRITTEN, 0 };

	memcpy(sparse.gpu, gpu, sizeof(sparse.gpu));
	return !ioctl(fd, UVM_MAP_EXTERNAL_SPARSE, &sparse) && !sparse.status;
}

bool mpsd_uvm_free(int fd, uint64_t base, size_t size)
{
	struct free_range range = { .base = base, .length = size, .status = UNWRITTEN };

	if (ioctl(fd, UVM_FREE, &range))
		return false;
	return !(range.status == UNWRITTEN ? range.status_since_610 : range.status);
}

bool mpsd_uvm_unregister_space(int fd, const uint8_t gpu[16])
{
	struct gpu_space space = { .status = UNWRITTEN };

	memcpy(space.gpu, gpu, sizeof(space.gpu));
	return !ioctl(fd, MPSD_UVM_UNREGISTER_SPACE, &space) && !space.status;
}

/* Branches before 550 have the status where the node is, and do the same. */
void mpsd_uvm_prefer_host(int fd, uint64_t base, size_t size)
{
	struct preferred_location wish = { .base = base, .length = size, .node = -1 };

	memcpy(wish.processor, cpu, sizeof(wish.processor));
	ioctl(fd, UVM_SET_PREFERRED_LOCATION, &wish);
}
