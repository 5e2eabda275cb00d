/* SPDX-License-Identifier: MIT */
/*
 * What a copy of the driver is told of the process's mappings when it reads /proc/self/maps: all but the windows.
 * It takes what it finds there for taken, and would not lay its own window over the first copy's.
 */
#pragma once

#include <stdbool.h>

/* Whether the path is that file. */
bool mpsd_maps_is(const char *path);

/* A descriptor of the text; -1 and errno. */
int mpsd_maps_open(void);
