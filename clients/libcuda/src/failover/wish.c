// SPDX-License-Identifier: MIT
#include "failover/wish.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "debug.h"
#include "failover/line.h"
#include "failoverwire.h"
#include "proxy.h"

#define PATIENCE_MS 10000

static struct mpsd_wish wish = { .mode = MPSD_FAILOVER_EXACT };

/* A program that asked for validation must not take silence for a result. */
static void validate(const char *where)
{
	wish.validates = where && *where;
	if (!wish.validates)
		mpsd_say("validation disabled: the daemon offers no fail-over at its protection level, or the program "
			 "was not started by mpsd-run");
}

/* A program that asks the driver to wait for each kernel in its launch must wait. */
static void read_relay(void)
{
	const char *given = mpsd_debug_text(MPSD_DEBUG_RELAY), *blocking = getenv("CUDA_LAUNCH_BLOCKING");

	if (blocking && *blocking && strcmp(blocking, "0") != 0) {
		wish.relay = MPSD_WISH_NEVER;
		return;
	}
	if (!given || !strcmp(given, "auto"))
		return;
	if (!strcmp(given, "off"))
		wish.relay = MPSD_WISH_NEVER;
	else if (!strcmp(given, "always"))
		wish.relay = MPSD_WISH_ALWAYS;
	else
		mpsd_say("MPSD_DEBUG: relay=%s is not one of auto, off, always: using auto", given);
}

static void read_standby(void)
{
	const char *given = mpsd_debug_text(MPSD_DEBUG_STANDBY);

	if (given && !strcmp(given, "lazy"))
		wish.mirror = MPSD_WISH_LAZY;
	else if (given && !strcmp(given, "eager"))
		wish.mirror = MPSD_WISH_EAGER;
	else if (given)
		mpsd_say("MPSD_DEBUG: standby=%s is not one of eager, lazy: using the daemon's choice", given);
}

/* What MPSD_FAILOVER says, or MPSD_FAILOVER_VALIDATE of the previous release where it does not say less. */
static const char *read_mode(void)
{
	const char *mode = secure_getenv("MPSD_FAILOVER");
	const char *validates = mpsd_debug_retired("MPSD_FAILOVER_VALIDATE", "MPSD_FAILOVER=validate");

	return validates && !strcmp(validates, "1") && (!mode || !strcmp(mode, "exact")) ? "validate" : mode;
}

static void read_environment(void)
{
	const char *where = secure_getenv("MPSD_FAILOVER_SOCKET"), *mode = read_mode();

	wish.patience_ns = 1000000 * mpsd_debug_number(MPSD_DEBUG_PATIENCE_MS, PATIENCE_MS, 1, 100, 600000);
	read_relay();
	read_standby();
	if (mode && !strcmp(mode, "off"))
		return;
	if (where && strlen(where) < sizeof(wish.path))
		strcpy(wish.path, where);
	if (mode && !strcmp(mode, "keep"))
		wish.mode = MPSD_FAILOVER_KEEP;
	else if (mode && !strcmp(mode, "validate"))
		validate(where);
	else if (mode && strcmp(mode, "exact"))
		mpsd_say("MPSD_FAILOVER=%s is not one of off, keep, exact, validate: using exact", mode);
}

const struct mpsd_wish *mpsd_wish(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_environment);
	return &wish;
}

bool mpsd_line_offered(void)
{
	return *mpsd_wish()->path;
}
