// SPDX-License-Identifier: MIT
#include "debug.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "proxy.h"

#define VARIABLE "MPSD_DEBUG"
#define ROOM 1024

/* With the variable of the previous release, which this release still reads. */
static const struct {
	const char *name, *retired;
} fields[MPSD_DEBUG_COUNT] = {
	[MPSD_DEBUG_VAULT] = { "vault", "MPSD_VAULT" },
	[MPSD_DEBUG_WINDOW_BASE] = { "window_base", "MPSD_WINDOW_BASE" },
	[MPSD_DEBUG_WINDOW_BYTES] = { "window_bytes", "MPSD_WINDOW_BYTES" },
	[MPSD_DEBUG_PLACE_BASE] = { "place_base", "MPSD_PLACE_BASE" },
	[MPSD_DEBUG_ZONE_BYTES] = { "zone_bytes", "MPSD_ZONE_BYTES" },
	[MPSD_DEBUG_ZONE_BUDGET] = { "zone_budget", "MPSD_ZONE_BUDGET" },
	[MPSD_DEBUG_FAR_BYTES] = { "far_bytes", "MPSD_FAR_BYTES" },
	[MPSD_DEBUG_QUARANTINE_BYTES] = { "quarantine_bytes", "MPSD_QUARANTINE_BYTES" },
	[MPSD_DEBUG_QUARANTINE_S] = { "quarantine_s", "MPSD_QUARANTINE_S" },
	[MPSD_DEBUG_HOST_GUARD_BYTES] = { "host_guard_bytes", "MPSD_HOST_GUARD_BYTES" },
	[MPSD_DEBUG_STANDBY] = { "standby", "MPSD_FAILOVER_MIRROR" },
	[MPSD_DEBUG_RELAY] = { "relay", "MPSD_FAILOVER_RELAY" },
	[MPSD_DEBUG_SNAPSHOT_MIB] = { "snapshot_mib", "MPSD_FAILOVER_UNDO_MIB" },
	[MPSD_DEBUG_PATIENCE_MS] = { "patience_ms", "MPSD_FAILOVER_PATIENCE_MS" },
	[MPSD_DEBUG_RESCUE_MS] = { "rescue_ms", NULL },
	[MPSD_DEBUG_SETTLE_MS] = { "settle_ms", "MPSD_FAILOVER_SETTLE_MS" },
	[MPSD_DEBUG_AUTOPSY_MS] = { "autopsy_ms", "MPSD_FAILOVER_AUTOPSY_MS" },
	[MPSD_DEBUG_CUTTERS] = { "cutters", "MPSD_FAILOVER_CUTTERS" },
	[MPSD_DEBUG_RELEASE] = { "release", "MPSD_FAILOVER_GIVE_BACK" },
	[MPSD_DEBUG_DIE_BEFORE_EFFECT] = { "die_before_effect", NULL },
	[MPSD_DEBUG_DIE_AFTER_SIGNAL] = { "die_after_signal", NULL },
};

static const char *values[MPSD_DEBUG_COUNT];
static char kept[ROOM];		/* the values: the program may change its environment */
static size_t used;

/* NULL and a line where there is no room. */
static char *keep(const char *variable, const char *text)
{
	size_t size = strlen(text) + 1;
	char *copy = kept + used;

	if (size > sizeof(kept) - used) {
		mpsd_say("%s is ignored: all debug settings are limited to %d bytes; shorten it", variable, ROOM - 1);
		return NULL;
	}
	used += size;
	return memcpy(copy, text, size);
}

static void set(char *field)
{
	char *value = strchr(field, '=');

	if (value)
		*value++ = 0;
	for (int i = 0; value && i < MPSD_DEBUG_COUNT; i++)
		if (!strcmp(fields[i].name, field)) {
			values[i] = value;
			return;
		}
	if (value)
		mpsd_say(VARIABLE ": the name %s is unknown and ignored; \"mpsd help knobs\" lists the names", field);
	else
		mpsd_say(VARIABLE ": %s has no value and is ignored; write name=value", field);
}

const char *mpsd_debug_retired(const char *variable, const char *successor)
{
	const char *given = secure_getenv(variable);

	if (given)
		mpsd_say("%s is deprecated and the next release ignores it; set %s instead", variable, successor);
	return given;
}

static void set_retired(int i)
{
	char successor[64] = VARIABLE "=";
	const char *given;

	strcat(strcat(successor, fields[i].name), "=VALUE");
	given = mpsd_debug_retired(fields[i].retired, successor);
	if (given && *given && !values[i])
		values[i] = keep(fields[i].retired, given);
}

static void read_environment(void)
{
	const char *given = secure_getenv(VARIABLE);
	char *rest = given && *given ? keep(VARIABLE, given) : NULL, *field;

	while ((field = strsep(&rest, ",")))
		if (*field)
			set(field);
	for (int i = 0; i < MPSD_DEBUG_COUNT; i++)
		if (fields[i].retired)
			set_retired(i);
}

const char *mpsd_debug_text(enum mpsd_debug field)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_environment);
	return values[field];
}

uint64_t mpsd_debug_number(enum mpsd_debug field, uint64_t otherwise, uint64_t unit, uint64_t least, uint64_t most)
{
	const char *given = mpsd_debug_text(field);
	char *end = NULL;
	uint64_t value;

	if (!given || !*given)
		return otherwise;
	errno = 0;
	value = strtoull(given, &end, 0);
	if (*given >= '0' && *given <= '9' && !errno && !*end && value % unit == 0 && value >= least && value <= most)
		return value;
	mpsd_say(VARIABLE ": %s=%s is not a multiple of %llu from %llu to %llu: using the default", fields[field].name,
		 given, (unsigned long long)unit, (unsigned long long)least, (unsigned long long)most);
	return otherwise;
}
