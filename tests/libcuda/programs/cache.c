// SPDX-License-Identifier: MIT
/* Prints what the proxy's reader finds for libcuda.so.1 in an ld.so.cache. */
#include <stdbool.h>
#include <stdio.h>

bool mpsd_cache_lookup(const char *cache, const char *name, bool (*fits)(const char *path, void *context),
		       void *context);

static bool print(const char *path, void *context)
{
	(void)context;
	puts(path);
	return false;
}

int main(int count, char **given)
{
	return count == 2 && mpsd_cache_lookup(given[1], "libcuda.so.1", print, NULL);
}
