/* SPDX-License-Identifier: MIT */
#pragma once

#include <stdbool.h>
#include <stddef.h>

/* The first entry for `name` in an ld.so.cache that `fits`. */
bool mpsd_cache_lookup(const char *cache, const char *name, bool (*fits)(const char *path, void *context),
		       void *context);
