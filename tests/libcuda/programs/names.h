/* SPDX-License-Identifier: MIT */
/* What a driver of names (tests/support/namesdriver.py) has besides them: it finds them by the caller's version. */
#include <stddef.h>
#include <string.h>
#define OUT __attribute__((visibility("default")))
/* Data, as debuggers look for. */
OUT extern unsigned int cudbgIpcFlag;
unsigned int cudbgIpcFlag = 4711;
static int chosen(void) { return CHOSEN; }
static void *choose(void) { return (void *)chosen; }
OUT int cuOwnChosen(void) __attribute__((ifunc("choose")));
OUT int cuInit(unsigned int flags) { return flags ? 1 : 0; }
OUT int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
struct entry { const char *base; int since; int per_thread; void *function; };
static const struct entry entries[];
OUT int cuGetProcAddress_v2(const char *symbol, void **found, int version, unsigned long long flags, int *status)
{
	const struct entry *best = NULL;

	for (const struct entry *at = entries; at->base; at++)
		if (!strcmp(at->base, symbol) && at->since <= version && at->per_thread <= (flags == 2) &&
		    (!best || at->per_thread > best->per_thread ||
		     (at->per_thread == best->per_thread && at->since >= best->since)))
			best = at;
	*found = best ? best->function : NULL;
	if (status)
		*status = best ? 0 : 1;
	return best || status ? 0 : 500;
}
OUT int cuGetProcAddress(const char *symbol, void **found, int version, unsigned long long flags)
{
	return cuGetProcAddress_v2(symbol, found, version, flags, NULL);
}
