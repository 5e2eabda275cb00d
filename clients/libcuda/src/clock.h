/* SPDX-License-Identifier: MIT */
/* Waits and deadlines. */
#pragma once

#include <stdint.h>
#include <time.h>

/* Sleeps that long, whatever signals come. */
void mpsd_pause(int milliseconds);

/* CLOCK_MONOTONIC. */
uint64_t mpsd_now_ns(void);

/* When that will have passed, for pthread_cond_timedwait and its like. */
struct timespec mpsd_in(int milliseconds);
