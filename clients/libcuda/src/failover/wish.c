// SPDX-License-Identifier: MIT
#include "failover/wish.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "failover/line.h"
#include "failoverwire.h"
#include "limits.h"
#include "proxy.h"

#define PATIENCE_MS 10000

static struct mpsd_wish wish = { .mode = MPSD_FAILOVER_EXACT };

/* Who asked for it is not to take silence for a result. */
static void read_validation(const char *where, const char *mode)
{
	const char *given = secure_getenv("MPSD_FAILOVER_VALIDATE"), *why = NULL;

	if (!given || !strcmp(given, "0"))
		return;
	if (strcmp(given, "1") != 0)
		why = "MPSD_FAILOVER_VALIDATE is neither 0 nor 1";
	else if (mode && (!strcmp(mode, "off") || !strcmp(mode, "keep")))
		why = "MPSD_FAILOVER asks for less than exact";
	else if (!where || !*where)
		why = "the daemon offers no fail-over ([failover] enabled), or the program was not started by mpsd-run";
	if (why)
		mpsd_say("nothing is validated: %s", why);
	wish.validates = !why;
}

/* Who asks the driver to wait for each kernel in its launch is to wait. */
static void read_relay(void)
{
	const char *given = secure_getenv("MPSD_FAILOVER_RELAY"), *blocking = getenv("CUDA_LAUNCH_BLOCKING");

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
		mpsd_say("MPSD_FAILOVER_RELAY: not one of auto, off, always; auto is taken");
}

static void read_environment(void)
{
	const char *where = secure_getenv("MPSD_FAILOVER_SOCKET"), *mode = secure_getenv("MPSD_FAILOVER");
	const char *mirror = secure_getenv("MPSD_FAILOVER_MIRROR");

	wish.patience_ns = 1000000 * mpsd_read_number("MPSD_FAILOVER_PATIENCE_MS", PATIENCE_MS, 1, 100, 600000);
	read_relay();
	read_validation(where, mode);
	if (mode && !strcmp(mode, "off"))
		return;
	if (where && strlen(where) < sizeof(wish.path))
		strcpy(wish.path, where);
	if (mode && !strcmp(mode, "keep"))
		wish.mode = MPSD_FAILOVER_KEEP;
	else if (mode && strcmp(mode, "exact"))
		mpsd_say("MPSD_FAILOVER: not one of off, keep, exact; exact is taken");
	if (mirror && !strcmp(mirror, "lazy"))
		wish.mirror = MPSD_WISH_LAZY;
	else if (mirror && !strcmp(mirror, "eager"))
		wish.mirror = MPSD_WISH_EAGER;
	else if (mirror)
		mpsd_say("MPSD_FAILOVER_MIRROR: not one of eager, lazy; the daemon's choice is taken");
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
