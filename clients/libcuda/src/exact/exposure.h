/* SPDX-License-Identifier: MIT */
/*
 * The program is exposed while an epoch holds work that cannot be rolled back: a fault now would lose it. The daemon hears of
 * that (EXPOSED in failoverwire.h), so that status does not call the program protected.
 */
#pragma once

#include <stdbool.h>

/* By any thread, also with the lock, before the driver gets the work. The thread of line.c says it. */
void mpsd_exposure_begin(const char *why);

/* Mode exact has ended, and the program has not left fail-over. */
void mpsd_exposure_stays(const char *why);

/* Why it is exposed, or was a moment ago; NULL: it is not. A program that does so in each epoch stays exposed between them. */
const char *mpsd_exposure_why(void);

/* When mpsd_exposure_why may have become NULL; -1: it does not become that by itself. */
int mpsd_exposure_left_ms(void);
