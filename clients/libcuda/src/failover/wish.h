/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdint.h>

/* What the program's environment says of fail-over. */
struct mpsd_wish {
	char path[108];			/* of the daemon's socket, as long as such a path may be; empty: none */
	uint32_t mode;			/* enum mpsd_failover_mode, and never OFF */
};

const struct mpsd_wish *mpsd_wish(void);
