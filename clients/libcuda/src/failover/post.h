/* SPDX-License-Identifier: MIT */
/* A connection to the daemon's failover.sock, and the clock that its times are of. */
#pragma once

#include <stdint.h>

/* -1: nobody is there. `path` has room in an address. Sending has a deadline. */
int mpsd_post_connect(const char *path);

/* CLOCK_MONOTONIC. */
uint64_t mpsd_post_now_ns(void);
