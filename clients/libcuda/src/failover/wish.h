/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* What the program's environment says of fail-over. */
enum mpsd_wish_mirror {
	MPSD_WISH_ANY,
	MPSD_WISH_EAGER,
	MPSD_WISH_LAZY,
};

/* Whether launches are left to a thread of this library's (exact/relay.h). */
enum mpsd_wish_relay {
	MPSD_WISH_BY_NEED,
	MPSD_WISH_NEVER,
	MPSD_WISH_ALWAYS,	/* whenever it may be, which is for tests: it spins for good */
};

struct mpsd_wish {
	char path[108];			/* of the daemon's socket, as long as such a path may be; empty: none */
	uint32_t mode;			/* enum mpsd_failover_mode, and never OFF */
	enum mpsd_wish_relay relay;
	enum mpsd_wish_mirror mirror;	/* when its standby is made: at once, or in a move */
	/* That what only others can bring is waited for: the next standby, that who keeps others goes on. */
	uint64_t patience_ns;
	bool validates;			/* in mode exact, and there is a socket */
};

const struct mpsd_wish *mpsd_wish(void);
