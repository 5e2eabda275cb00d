/* SPDX-License-Identifier: MIT */
/* The head of a fat binary, as nvcc writes it. */
#pragma once

#include <stdint.h>

#define MPSD_FATBIN 0xba55ed50u

struct mpsd_fatbin {
	uint32_t magic;
	uint16_t version, head_bytes;
	uint64_t bytes;		/* that follow the head */
};
