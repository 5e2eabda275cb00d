/* SPDX-License-Identifier: MIT */
/*
 * What a copy of the driver asks of the resource manager: layouts and numbers are those of the open kernel modules
 * (NVOS00, NVOS21, NVOS54, NVOS55, NVOS64, NV83DE; 535 to 580).
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define MPSD_RM_ALLOC 0x462bu		/* the ioctl's type and number; its size says which layout */
#define MPSD_RM_FREE 0xc0104629ul
#define MPSD_RM_CONTROL 0xc020462aul
#define MPSD_RM_DUPLICATE 0xc01c4634ul
#define MPSD_RM_WITH_RIGHTS 0x30u

#define MPSD_RM_DEVICE 0x80u		/* classes */
#define MPSD_RM_DEBUGGER 0x83deu
#define MPSD_RM_CHANNEL_GROUP 0xa06cu
#define MPSD_RM_CHANNEL 0x6fu		/* the low byte; the rest is the generation's */

#define MPSD_RM_READ_ALL_SM_ERROR_STATES 0x83de030cu
#define MPSD_RM_CLEAR_ALL_SM_ERROR_STATES 0x83de0310u
#define MPSD_RM_MOST_SMS 100		/* a call */

struct mpsd_rm_allocation {
	uint32_t root, parent, object, class;
	uint64_t parameters;
	union {
		struct {
			uint32_t size, status;
		} usual;
		struct {
			uint64_t rights;
			uint32_t size, flags, status, padding;
		} with_rights;
	};
};

struct mpsd_rm_release {
	uint32_t root, parent, object, status;
};

struct mpsd_rm_duplicate {
	uint32_t root, parent, object, other_root, other_object, flags, status;
};

struct mpsd_rm_control {
	uint32_t client, object, command, flags;
	uint64_t parameters;
	uint32_t size, status;
};

/* What an SM knows of an exception: `pc` is where the warp was that had it, in its own address space; 0: there was none. */
struct mpsd_rm_sm_state {
	uint32_t global_esr, warp_esr, pc_low, global_mask, warp_mask;
	uint64_t address, pc;
	uint32_t cluster_esr, cluster_mask;
};

struct mpsd_rm_sm_states {
	uint32_t channel, count;
	struct mpsd_rm_sm_state states[MPSD_RM_MOST_SMS];
	uint32_t old_fault;
	struct {
		uint8_t valid;
		uint32_t info;
	} fault;
	uint32_t first;
};

_Static_assert(sizeof(struct mpsd_rm_allocation) == MPSD_RM_WITH_RIGHTS &&
	       sizeof(struct mpsd_rm_release) == (MPSD_RM_FREE >> 16 & 0x3fff) &&
	       sizeof(struct mpsd_rm_duplicate) == (MPSD_RM_DUPLICATE >> 16 & 0x3fff) &&
	       sizeof(struct mpsd_rm_control) == (MPSD_RM_CONTROL >> 16 & 0x3fff) &&
	       sizeof(struct mpsd_rm_sm_states) == 4824, "as the numbers of the ioctls, or the driver's own sizes, say");

/* Of an RM_ALLOC that has returned. */
static inline bool mpsd_rm_allocated(unsigned long request, const struct mpsd_rm_allocation *allocation)
{
	bool rights = (request >> 16 & 0x3fff) == MPSD_RM_WITH_RIGHTS;

	return !(rights ? allocation->with_rights.status : allocation->usual.status);
}
