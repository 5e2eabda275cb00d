/* SPDX-License-Identifier: MIT */
/* Threads of this library's own. */
#pragma once

#include <stdbool.h>

/* Detached, and signals are for the program's own threads. False: it does not run. */
bool mpsd_thread_start(void *(*run)(void *), void *argument);
